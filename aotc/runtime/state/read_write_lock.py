"""The lock between calls, which may run together, and an update of the weights, which runs alone."""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from aotc.errors import BindError
from aotc.machine.forks import renew_in_child

T = TypeVar("T")


class ReadWriteLock:
    """A read-write lock that prefers writers: while a writer waits, no further reader enters.

    A thread that is alone may enter: what its signals' handlers do, it does itself. So may one that is inside.

    A handler may raise wherever Python looks for signals: after any call, and on entering a function of Python's. So
    nothing is done between taking and giving back but in one call of C each, the latter the first of a `finally`; and
    waiters poll every millisecond, since a signal handler can lose a wake-up.

    replacing: the lock of those who look at tensors that were replaced, or replace them; states that are replaced
        together share one gate, and so this lock.
    """

    LOOKS_EVERY = 0.001

    def __init__(self) -> None:
        self._entry = threading.RLock()
        self.replacing = threading.RLock()
        self._inside: dict[object, int] = {}
        renew_in_child(self, ReadWriteLock._renew)

    def _renew(self) -> None:
        self._entry, self.replacing = threading.RLock(), threading.RLock()
        own = threading.get_ident()
        for token in [token for token, thread in self._inside.items() if thread != own]:
            del self._inside[token]  # in place: a call of this thread that is inside takes itself out of it

    def run_inside(self, function: Callable[[], T]) -> T:
        thread, token, inside = threading.get_ident(), object(), self._inside
        try:
            if thread in inside.values():  # one that waits to be alone waits for this thread
                inside[token] = thread
            else:
                with self._entry:
                    inside[token] = thread
            return function()
        finally:
            inside.pop(token, None)

    def run_alone(self, function: Callable[[], T]) -> T:
        """Raises BindError in a thread that is inside: it would wait for itself."""
        if threading.get_ident() in self._inside.values():
            raise BindError(
                "the weights cannot be replaced within a call that runs the module eagerly, by the same thread",
                hint="let a signal's handler set a flag, and update where the flag is read",
            )
        with self._entry:
            while self._inside:
                time.sleep(self.LOOKS_EVERY)
            return function()


def set_all(owners: Sequence[dict[str, Any]], keys: Iterable[str], values: Sequence[Any]) -> None:
    """Set `owner[key] = value` for all of them, without a bytecode of Python's between two: all or none, for signals,
    threads and forks alike."""
    deque(map(operator.setitem, owners, keys, values), maxlen=0)
