"""The script `aotc` and `python -m aotc`: the command line, where the packages of the extra `build` are installed."""

from __future__ import annotations

import sys

_EXTRA = ("click", "elftools", "jinja2", "pygments", "rich", "yaml")
"""The modules of the extra `build` in pyproject.toml."""


def main() -> None:
    try:
        from aotc.cli import main as command_line

        command_line(prog_name="aotc")
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.stderr.write(
            f"error: the command line needs the package `{error.name}`, which is not installed; "
            "loading artifacts does not\nhint: pip install 'aotc[build]'\n"
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
