"""How results are printed: JSON, tables, sizes."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aotc.amounts import size_text
from aotc.errors import AotcError, one_line, visible

if TYPE_CHECKING:
    from rich.console import Console

QUIET = "aotc.quiet"
"""Whether `--quiet` is given, in the `meta` of click's context."""


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Redirect what a model's code prints to standard error: standard output is for results."""
    sys.stdout.flush()
    results = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(results, 1)
        os.close(results)


def echo(message: object = "", *, err: bool = False) -> None:
    """Print one line; newlines and control characters in names and messages from elsewhere are escaped."""
    click.echo(one_line(str(message)), err=err)


def echo_lines(message: object, *, err: bool = False, nl: bool = True) -> None:
    """Print a text whose lines are aotc's own: an error, the output of a compiler, a manifest."""
    click.echo(visible(str(message)), err=err, nl=nl)


def print_json(value: Any) -> None:
    """Print one JSON document. Records become objects; a value without a JSON form becomes its text."""
    try:
        in_unicode = codecs.lookup(sys.stdout.encoding).name.startswith("utf")
    except (LookupError, TypeError):
        in_unicode = False
    text = json.dumps(msgspec.to_builtins(value, enc_hook=str), indent=2, ensure_ascii=not in_unicode)
    click.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def error_data(error: AotcError) -> dict[str, Any]:
    """An error under `--json`."""
    named = {"type": type(error).__name__, "message": error.message, "hint": error.hint, "issues": error.issues}
    return {**named, "fields": error.fields}


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print one row a line. Where output is not a terminal, lines are neither wrapped nor cut."""
    from rich.table import Table

    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(one_line, row))
    console().print(table, soft_wrap=True)


def notice(message: str) -> None:
    """A line on standard error that `--quiet` leaves out."""
    if not _quiet():
        echo(message, err=True)


def written(path: Path, data: bytes) -> str:
    """Write a file that an option asks for. Returns what to say of it. Raises StoreError."""
    from aotc.store.files.writing import write_output

    write_output(path, data)
    return f"wrote {path}  {size_text(len(data))}"


def _quiet() -> bool:
    return bool(click.get_current_context().find_root().meta.get(QUIET))


def progress_console(quiet: bool = False) -> Console:
    """Standard error, for what is shown while a command works; silent with `quiet` and under `--quiet`."""
    from rich.console import Console

    return Console(stderr=True, quiet=quiet or _quiet())


def console() -> Console:
    """Standard output; where it is not a terminal, lines are as long as they need to be."""
    from rich.console import Console

    as_it_is: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
    terminal = Console(**as_it_is)
    return terminal if terminal.is_terminal else Console(width=10_000, **as_it_is)


def duration(seconds: float) -> str:
    """A time for a person: `40 s`, `3 min`, `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
