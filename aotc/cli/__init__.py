"""The command line; the only part of aotc that prints.

Exit codes: 0 all well, 1 a unit failed to build or to verify, a check failed, the store is damaged or over its limit,
a measurement reached its limit, 2 the command could not run, 130 interrupted by Ctrl-C, 143 ended by SIGTERM. A command
imports what it works with when it is called, so that `--help` answers at once.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

import aotc
from aotc.cli import (
    advise,
    audit,
    bench,
    build,
    caches,
    contents,
    doctor,
    inspect,
    maintenance,
    manifests,
    release,
    tags,
    tune,
    verify,
)
from aotc.cli.options import log_options, wants_json
from aotc.cli.output import echo_lines, error_data, print_json
from aotc.cli.signals import exit_code, in_words
from aotc.errors import AotcError, StoreError


class _Main(click.Group):
    def main(self, *arguments: Any, **options: Any) -> Any:
        _open_closed_streams()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")  # what the terminal's encoding has no character for
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            if error.filename is not None or error.errno not in _NO_ROOM:  # what writes a file says which one
                raise
            _leave_output()
            with suppress(OSError):
                click.echo(f"error: cannot write to standard output: {error.strerror}", err=True)
            sys.exit(2)

    def invoke(self, context: click.Context) -> Any:
        """Print an AotcError as it is and exit with 2; everything else is a bug and keeps its traceback."""
        try:
            with _temporary_folder_typed(), _missing_torch_typed():
                return super().invoke(context)
        except AotcError as error:
            with suppress(OSError):
                echo_lines(f"error: {error}", err=True)
                if wants_json(context):
                    print_json({"error": error_data(error)})
            sys.exit(2)
        except KeyboardInterrupt as stop:
            with suppress(OSError):
                click.echo(f"\n{in_words(stop)}", err=True)
            sys.exit(exit_code(stop))


@contextmanager
def _temporary_folder_typed() -> Iterator[None]:
    """Raise StoreError where Python finds no folder for temporary files, as under a root that is mounted read-only."""
    try:
        yield
    except FileNotFoundError as error:
        if isinstance(error, AotcError) or "temporary directory" not in str(error):
            raise
        hint = "set TMPDIR to a folder that can be written, as a volume or a tmpfs"
        raise StoreError(str(error.strerror), hint=hint) from error


@contextmanager
def _missing_torch_typed() -> Iterator[None]:
    """Raise TorchMissingError where a command imports torch, which is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        from aotc.torch_missing import torch_missing

        raise torch_missing(error, "this command") from None


def _open_closed_streams() -> None:
    """Open closed standard streams as /dev/null.

    Else the next file that is opened, here or in a child process, gets the stream's number and receives its output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _leave_output() -> None:
    """Discard unwritten output: a flush at exit would fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _leave_garbage() -> None:
    """Skip the garbage collection at exit: with torch imported it takes half a second.

    Not where Triton was imported, as transformers does: its bindings (3.9) would report all their objects as leaked.
    """
    if "triton" not in sys.modules:
        gc.freeze()


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(aotc.__version__, package_name="aotc")
def main() -> None:
    """Compile PyTorch models ahead of time; start services with no compiler in the process."""
    atexit.register(_leave_garbage)
    # torch says so wherever NumPy is not installed; aotc does not need it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


COMMANDS = (
    manifests.init,
    manifests.schema,
    doctor.doctor,
    advise.advise,
    build.build,
    tune.tune,
    verify.verify,
    audit.audit,
    bench.bench,
    contents.list_store,
    contents.picks,
    contents.diff,
    inspect.inspect,
    release.merge,
    release.sign,
    release.push,
    release.fetch,
    release.export,
    tags.tag,
    tags.rm,
    tags.prune,
    caches.cache,
    maintenance.fsck,
    maintenance.gc,
)

for command in COMMANDS:
    main.add_command(log_options(command))
