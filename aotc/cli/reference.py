"""COMMANDS.md: the reference of the command line, written from the commands themselves.

python -m aotc.cli.reference > aotc/cli/COMMANDS.md
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

import click

from aotc.cli import COMMANDS

_INTRODUCTION = """\
# Commands

For users of the command line. This file is generated: `python -m aotc.cli.reference > aotc/cli/COMMANDS.md`.

Install the command line with `pip install 'aotc[build]'`. `aotc --help` lists the commands, `aotc COMMAND --help` shows
one of them. On a machine that only serves, `aotc doctor` needs no more than `click`. Where torch is not installed,
commands that need it, as `build`, `verify` and `bench`, say so; `ls`, `inspect`, `fetch` and `sign` do not need it.

- **REF** is `[STORE#]model[:tag]` or `[STORE#]model@sha256:…`. `verify`, `inspect` and `aotc.load` also take
  `oci://HOST[:PORT]/REPO[:tag]` and `oci://HOST[:PORT]/REPO@sha256:…`. The tag is `latest` where none is given.
- **STORE** is a folder or a URL: the one in REF or `--store` (two that differ are refused), else `$AOTC_STORE`, else
  `aotc-store`: see [REMOTES.md](../store/REMOTES.md).
- **MANIFEST** is a YAML file. See the [guide to manifests](../manifest/GUIDE.md).
- Results go to standard output; progress, warnings and errors go to standard error. `--json` prints one JSON document;
  an error is `{"error": {"type", "message", "hint", "issues", "fields"}}` then.
- Every command has `-h`; `-q`, which leaves progress out; and `-v`, which prints the log on standard error (`-vv`: with
  each decision). `AOTC_LOG=info` and `AOTC_LOG=debug` do the same in any process that imports aotc.

| exit code | meaning |
|---:|---|
| 0 | success |
| 1 | a unit failed to build or to verify, two bundles differ, a store is damaged, a check fails, a limit was reached |
| 2 | the command could not run: wrong options, a manifest with mistakes, any [error](../ERRORS.md) |
| 130, 143 | ended by Ctrl-C or SIGTERM; a build keeps finished units, `aotc bench` shows what was measured |

Completion in the running shell: `eval "$(_AOTC_COMPLETE=bash_source aotc)"`; `zsh_source` for zsh, `fish_source` for
fish.

| command | does |
|---|---|
"""


def reference() -> str:
    """The whole of COMMANDS.md."""
    named = dict(_each(COMMANDS))
    rows = [f"| [{name}](#{name.replace(' ', '-')}) | {_summary(command)} |" for name, command in named.items()]
    return _INTRODUCTION + "\n".join(rows) + "\n" + "".join(_section(*item) for item in named.items())


def _each(commands: Iterable[click.Command], before: str = "aotc") -> Iterator[tuple[str, click.Command]]:
    """Every command by its full name, those of a group too."""
    for command in commands:
        if isinstance(command, click.Group):
            yield from _each(command.commands.values(), f"{before} {command.name}")
        else:
            yield f"{before} {command.name}", command


def _section(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=name)
    usage = " ".join((context.command_path, *command.collect_usage_pieces(context)))
    lines = ["", f"## {name}", "", f"    {usage}", "", inspect.cleandoc(command.help or "")]
    options = list(_options(command, context))
    if options:
        lines += ["", "| option | meaning |", "|---|---|", *options]
    return "\n".join(lines) + "\n"


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.params:
        if parameter.name in ("verbose", "quiet"):
            continue  # of every command: the introduction has them
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context)):
            option, meaning = (" ".join(text.split()).replace("|", r"\|") for text in record)
            yield f"| `{option}` | {meaning} |"


def _summary(command: click.Command) -> str:
    return (command.help or "").strip().partition("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    click.echo(reference(), nl=False)
