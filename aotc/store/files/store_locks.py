"""Locks of a store's files, with the errors of a store (`aotc.machine.locks`)."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from aotc.errors import CorruptError, StoreError
from aotc.machine.locks import close_lock, is_locked, lock, open_lock, unlock
from aotc.store.files.disk import open_regular, store_error, typed_errors
from aotc.store.files.writing import make_folder

_POLL = 0.01  # seconds; the holder is mostly done within a few milliseconds


@contextlib.contextmanager
def locked(
    path: Path, timeout: float, *, shared: bool = False, holders: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Hold the lock file `path`, alone or with others who share it. It may be held twice in one process if shared.

    Raises StoreError after `timeout` seconds, saying who may hold it (`holders()` if that says anything), or where the
    file system has no locks.
    """
    make_folder(path.parent)
    holder = path.with_name(path.name + ".holder")
    with typed_errors("lock", path):
        descriptor = open_lock(path)
    try:
        if not _acquire(path, descriptor, timeout, shared):
            raise StoreError(
                f"the lock {path} was not free within {timeout:g} s; {holders() or _holder(holder)}",
                hint="wait for that process to finish, or end it: a lock goes with its process",
                path=str(path),
            )
        with contextlib.nullcontext() if shared else _named_in(holder):
            yield
    except BaseException:
        unlock(descriptor)
        close_lock(descriptor)  # what failed first is what is said
        raise
    unlock(descriptor)
    with typed_errors("close the lock", path):
        os.close(descriptor)


def _acquire(path: Path, descriptor: int, timeout: float, shared: bool) -> bool:
    """Try until the deadline, without blocking: a signal's handler and Ctrl-C then run at once."""
    deadline = time.monotonic() + timeout
    try:
        while not lock(descriptor, shared=shared, wait=False):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
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
    """Whether a running process holds a lock on the file or folder `path`; what cannot be asked counts as held."""
    try:
        return is_locked(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def held_folder() -> tuple[Path, int]:
    """A new private folder (mode 0700) and a descriptor: until that is closed, gc sees the folder as in use.

    Raises OSError.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix="aotc-build-"))
        with contextlib.suppress(FileNotFoundError):  # cleaned away before it was locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                lock(descriptor)
                if os.fstat(descriptor).st_nlink:
                    return path, descriptor
            except BaseException:
                close_lock(descriptor)
                raise
            close_lock(descriptor)
