"""Waits for other processes of this machine, reported to listeners: for the trace of a build."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHORTEST = 0.02
"""Seconds; a shorter wait is not reported."""

OnWait = Callable[[str, float, float], None]
"""What was waited for, and from when to when, in seconds since the epoch; called in the thread that waited."""

_listeners: list[OnWait] = []


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Report to the listeners how long the block took; put only the acquisition of a lock in it."""
    began = time.time()
    try:
        yield
    finally:
        ended = time.time()
        if ended - began >= SHORTEST:
            for listener in _listeners:
                listener(what, began, ended)


@contextmanager
def listening(on_wait: OnWait) -> Iterator[None]:
    """While active, `on_wait` is told of each wait of this process's threads."""
    _listeners.append(on_wait)
    try:
        yield
    finally:
        _listeners.remove(on_wait)
