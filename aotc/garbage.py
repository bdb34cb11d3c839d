"""Python's garbage collector, kept from looking where there is nothing to find."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()
_within: Counter[int] = Counter()
"""How often each thread, by its number, has entered and not left."""
_collecting = False
"""Whether the collector was on when the first one entered."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Put off looking for garbage while objects are made that stay.

    Torch's modules are 170,000 objects. To look at all of them takes 80 ms, and a thousand new objects are enough to
    set that off; so much is an artifact's record. Where as many were made, the new ones alone are looked at in the end:
    else the next object would set it off.

    In all threads, until the last one leaves: so not for what waits for a network, or copies weights.
    """
    global _collecting
    thread = threading.get_ident()
    with _lock:
        if not _within:
            _collecting = gc.isenabled()
            gc.disable()
        _within[thread] += 1
    try:
        yield
    finally:
        if _collecting and 0 < gc.get_threshold()[0] < gc.get_count()[0]:
            gc.collect(0)
        with _lock:
            _within[thread] -= 1
            _collect_when_unused()


def _collect_when_unused() -> None:
    for thread in [thread for thread, count in _within.items() if count <= 0]:
        del _within[thread]
    if not _within and _collecting:
        gc.enable()


def _only_this_thread() -> None:
    """In a fork, which has no other."""
    global _lock
    _lock = threading.RLock()
    if _within:
        for thread in _within.keys() - {threading.get_ident()}:
            del _within[thread]
        _collect_when_unused()


os.register_at_fork(after_in_child=_only_this_thread)
