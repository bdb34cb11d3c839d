"""Locks between processes, all of them `flock`: it goes with its process, however that ends, and needs no clean-up.

What a lock means, how long to wait for it, and what to say of its holder is the caller's:
`aotc.store.files.store_locks` for the files of a store, `aotc.machine.benchmarking` for the devices of a machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def open_lock(path: Path, mode: int = 0o666) -> int:
    """The descriptor of a lock file, not yet locked, which is created if it is missing. A link is refused, so that a
    writer of the folder cannot choose another file.

    The file is never removed: a process that waited on a removed one would hold a lock that no other process sees.
    Raises OSError.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


@contextlib.contextmanager
def lock_file(path: Path, mode: int = 0o666) -> Iterator[int]:
    """As `open_lock`; unlocked and closed at the end. Raises OSError."""
    descriptor = open_lock(path, mode)
    try:
        yield descriptor
    finally:
        unlock(descriptor)
        close_lock(descriptor)


def lock(descriptor: int, *, shared: bool = False, wait: bool = True) -> bool:
    """Lock an open file or folder, alone or with others who share it. False if another process holds it, and `wait` is
    False. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Free the lock. Not left to close(): a child forked meanwhile has the same open file."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock on the file or folder. Raises OSError where it cannot be asked.

    A shared lock is tried: reading is enough for it, also on a network file system.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return not lock(descriptor, shared=True, wait=False)
    finally:
        close_lock(descriptor)


def close_lock(descriptor: int) -> None:
    """Close a file that was only locked, ignoring errors of the file system: nothing was written to it."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


# -- waits, for the trace of a build -----------------------------------------------------------------------------------


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
    """While active, call `on_wait` after each wait of this process's threads."""
    _listeners.append(on_wait)
    try:
        yield
    finally:
        _listeners.remove(on_wait)
