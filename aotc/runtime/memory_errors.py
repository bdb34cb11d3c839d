"""Want of memory as an error that says how much there may be: Python's own says nothing, torch's how much it asked for.

The loader imports this at its beginning: where memory is short, an import fails too.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from aotc.errors import MemoryLimitError

P = ParamSpec("P")
R = TypeVar("R")
_TOLD = re.compile("(?i)can(?:'|no)t allocate memory")
_ASKED = re.compile(r"(?:tried to allocate|unable to mmap) (\d+) bytes")
_LIMITS = (("Max address space", 0, "address space", "ulimit -v"), ("Max data size", 5, "data", "ulimit -d"))
"""Of /proc/self/limits: the line, the column of statm with what counts towards it, and both in words."""


def tells_of_memory(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises MemoryLimitError in the place of an error that comes of too little memory."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            # No variable here may hold the error: this frame is in its traceback, and would keep the module alive.
            if isinstance(error, MemoryLimitError) or not any(map(_is_of_memory, _chain(error))):
                raise
            raise memory_limit_error(_asked_for(error)) from error

    return wrapped


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _asked_for(error: BaseException) -> int | None:
    return next((int(found[1]) for one in _chain(error) if (found := _ASKED.search(str(one)))), None)


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _TOLD.search(str(error)) is not None


def memory_limit_error(asked: int | None) -> MemoryLimitError:
    """With the limit of this process that it is nearest to; without one, with what is free on the machine."""
    more = "" if asked is None else f": {_mib(asked)} were asked for at once"
    pages = [int(count) * os.sysconf("SC_PAGE_SIZE") for count in Path("/proc/self/statm").read_text().split()]
    limits = Path("/proc/self/limits").read_text().splitlines()
    found = [
        (int(soft) - pages[column], pages[column], int(soft), what, command)
        for name, column, what, command in _LIMITS
        for line in limits
        if line.startswith(name) and (soft := line.removeprefix(name).split()[0]).isdecimal()
    ]
    if found:
        _, used, limit, what, command = min(found)
        return MemoryLimitError(
            f"there is too little memory{more}; this process has {_mib(used)} of {what}, and may have {_mib(limit)}",
            hint=f"raise the limit with `{command}` (KiB), or LimitAS= and LimitDATA= of its systemd unit: more than "
            f"{_mib(max(used, limit) + (asked or 0))} are needed",
            asked=asked,
            used=used,
            limit=limit,
        )
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    free = next((int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable:")), 0)
    return MemoryLimitError(
        f"there is too little memory{more}; this process has {_mib(pages[1])} in memory, and {_mib(free)} are free",
        hint="give the machine or the container more memory, or load fewer models in one process; with "
        "vm.overcommit_memory=2 the kernel's CommitLimit counts",
        asked=asked,
        used=pages[1],
        limit=pages[1] + free,
    )


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
