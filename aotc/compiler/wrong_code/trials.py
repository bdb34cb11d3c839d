"""How a part is tried: within a budget, and, where compiled code may end its process, in a fork."""

from __future__ import annotations

import math
import os
import pickle
import resource
import select
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

from aotc.machine.processes import CRASHES, how_ended

SECONDS = 300.0
"""The longest time of a fork: where compiled code has written over the allocator's memory, it may wait for ever."""


class BudgetSpent(Exception):
    """The CPU time for the search is spent."""


class CpuBudget:
    """CPU seconds of this process, and of those it has waited for, from now on."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds, self._end = seconds, _spent() + seconds

    @property
    def is_spent(self) -> bool:
        return _spent() > self._end

    def check(self) -> None:
        """Raises BudgetSpent where they are spent."""
        if self.is_spent:
            raise BudgetSpent(f"{self.seconds:g} s of CPU time are spent")


def _spent() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


class Ended(NamedTuple):
    """A signal ended the fork: `how`, as text."""

    how: str


def in_fork(call: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What the function returns, in a fork of this process; `Ended` where one of `CRASHES` ends it. What it returns is
    pickled. Raises RuntimeError where the function raises, or where the fork gives no answer in time.

    This process must not have run OpenMP on several threads, of which a fork has none.
    """
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        _answer(call, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answered = bool(select.select([stream], [], [], seconds)[0])
        if not answered:
            os.kill(child, signal.SIGKILL)
        answer = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if -status in CRASHES:
        return Ended(how_ended(status))
    if status != 0 or not answer:
        said = answer.decode(errors="replace") if answer else how_ended(status)
        raise RuntimeError(said if answered else f"there is no answer after {seconds:g} s")
    return pickle.loads(answer)


def _answer(call: Callable[[], Any], writing: int) -> None:
    """Write what the function returns, or why it raised; ends this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handler that a build has is the build's
    try:
        answer, status = pickle.dumps(call()), 0
    except BaseException as error:
        answer, status = f"{type(error).__name__}: {error}".encode(), 1
    with os.fdopen(writing, "wb") as stream:
        stream.write(answer)
    os._exit(status)
