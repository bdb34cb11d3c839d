"""Starting Python processes of our own: they import the same aotc, wherever it is installed or checked out."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, AnyStr, TextIO


def child_environment() -> dict[str, str]:
    """This process's environment, with the folder of this aotc first on the child's path."""
    environment = dict(os.environ)
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def with_variables(environment: Mapping[str, str], variables: Mapping[str, str | None]) -> dict[str, str]:
    """The environment with these variables set; those that are None are unset."""
    changed = {**environment, **variables}
    return {name: value for name, value in changed.items() if value is not None}


def child_command(module: str, *arguments: str) -> list[str]:
    """The command line of `python -m module`, quiet about what torch says where NumPy is not installed.

    Without `-P` the working folder comes first on the child's path, and a folder `triton` in it before the package.
    """
    return [sys.executable, "-P", "-W", "ignore:Failed to initialize NumPy", "-m", module, *arguments]


PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG, linux/prctl.h."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to end this process when its parent ends, however it ends: a killed build leaves no orphan.

    With the parent's number it ends at once where that one has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def message_stream() -> TextIO:
    """Standard output, for messages to the parent alone, a line each.

    From now on whatever else is printed, by a model's code too, goes to standard error, which is a log.
    """
    stream = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return stream


def whole_lines(stream: IO[AnyStr]) -> Iterator[AnyStr]:
    """The messages of a child as they come; where it was killed while it wrote one, the last is not a message."""
    return (line for line in stream if line[-1:] in ("\n", b"\n"))
