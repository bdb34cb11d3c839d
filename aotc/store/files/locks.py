"""Locks between processes, all of them `flock`: it goes with its process, however that ends, and needs no clean-up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from aotc.errors import CorruptError, StoreError
from aotc.store.files.disk import open_regular, typed_errors
from aotc.store.files.os_errors import store_error
from aotc.store.files.writing import make_folder

_POLL = 0.01  # seconds; the holder is mostly done within a few milliseconds


@contextlib.contextmanager
def locked(
    path: Path, timeout: float, *, shared: bool = False, holders: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Hold the lock file `path`, alone or with others who share it. It may be held twice in one process if shared.

    Raises StoreError after `timeout` seconds, saying who may hold it (`holders()` if that says anything), or where the
    file system has no locks. The lock file is never removed: a process that waited on a removed one would hold a
    lock that no other process sees.
    """
    make_folder(path.parent)
    holder = path.with_name(path.name + ".holder")
    with typed_errors("lock", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if not _acquire(path, descriptor, timeout, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            raise StoreError(
                f"the lock {path} was not free within {timeout:g} s; {holders() or _holder(holder)}",
                hint="wait for that process to finish, or end it: a lock goes with its process",
                path=str(path),
            )
        with contextlib.nullcontext() if shared else _named_in(holder):
            yield
    except BaseException:
        _unlock(descriptor)
        close_lock(descriptor)  # what failed first is what is said
        raise
    _unlock(descriptor)
    with typed_errors("close the lock", path):
        os.close(descriptor)


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # not left to close(): a child forked meanwhile has the same open file
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def close_lock(descriptor: int) -> None:
    """Close a file that was only locked, ignoring errors of the file system: nothing was written to it."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _acquire(path: Path, descriptor: int, timeout: float, kind: int) -> bool:
    """Try until the deadline, without blocking: a signal's handler and Ctrl-C then run at once."""
    deadline = time.monotonic() + timeout
    while not _try(path, descriptor, kind):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL)
    return True


def _try(path: Path, descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise store_error("lock", path, error) from error
    return True


@contextlib.contextmanager
def _named_in(holder: Path) -> Iterator[None]:
    """Write this process's name into the file `holder`, for messages only: a full disk must not fail here."""
    with contextlib.suppress(OSError):
        _write_plain(holder, this_process())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink()


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _write_plain(path: Path, text: str) -> None:
    """Never through a symlink: a writer of the store must not choose which other file is overwritten."""
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)


def _holder(path: Path) -> str:
    try:
        with open_regular(path, follow=False) as stream:
            return f"{stream.read(200).decode(errors='replace')} may hold it"
    except (OSError, CorruptError):
        return "another aotc process may hold it"


def is_held(path: Path) -> bool:
    """Whether a running process holds a lock on the file or folder `path`; what cannot be asked counts as held.

    A shared lock is tried: reading is enough for it, also on a network file system.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return not _try(path, descriptor, fcntl.LOCK_SH)
    except StoreError:
        return True
    finally:
        close_lock(descriptor)


def held_folder(prefix: str) -> tuple[Path, int]:
    """A new private folder (mode 0700) and a descriptor: until that is closed, gc sees the folder as in use.

    Raises OSError.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        with contextlib.suppress(FileNotFoundError):  # cleaned away before it was locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_nlink:
                    return path, descriptor
            except BaseException:
                close_lock(descriptor)
                raise
            close_lock(descriptor)
