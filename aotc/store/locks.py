"""Locks between processes, which say who holds them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from aotc.errors import StoreError
from aotc.store.disk import make_folder, store_error

_POLL = 0.01  # seconds; the holder is mostly done within a few milliseconds


@contextlib.contextmanager
def locked(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file `path`. Raises StoreError after `timeout` seconds, or where the file system has no locks.

    The lock file is never removed: whoever waited on a removed one would hold a lock that nobody else sees.
    """
    import filelock  # here, since most starts of a service lock nothing

    make_folder(path.parent)
    lock = filelock.FileLock(path)
    holder = path.with_name(path.name + ".holder")
    try:
        lock.acquire(timeout=timeout, poll_interval=_POLL)
    except filelock.Timeout as error:
        raise StoreError(
            f"the lock {path} was not free within {timeout:g} s; {_holder(holder)}",
            hint="wait for that process to finish, or end it: a lock goes with its process",
            path=str(path),
        ) from error
    except NotImplementedError as error:  # filelock's answer where flock is missing
        raise store_error("lock", path, OSError(errno.ENOSYS, str(error))) from error
    except OSError as error:
        raise store_error("lock", path, error) from error
    try:
        with contextlib.suppress(OSError):  # only for the message above: a full disk must not matter here
            _write_plain(holder, f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink()
        lock.release()


def _write_plain(path: Path, text: str) -> None:
    """Never through a symlink: whoever can write the store must not choose what else is overwritten."""
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)


def _holder(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, errors="replace") as stream:
            return f"{stream.read(200)} may hold it"
    except OSError:
        return "another aotc process may hold it"
