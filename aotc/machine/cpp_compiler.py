"""The C++ compiler of a build: `$CXX`, else `g++`."""

from __future__ import annotations

import functools
import os
import subprocess

NOT_RUN = "cannot be run"


def compiler_name() -> str:
    return os.environ.get("CXX", "g++")


@functools.cache
def compiler_version() -> str:
    """The first line of `--version` of the C++ compiler, or a text that there is none."""
    name = compiler_name()
    try:
        shown = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return f"{name}: {NOT_RUN}"
    # The program's own name comes first and may be a path.
    return shown.partition("\n")[0].partition(" ")[2]
