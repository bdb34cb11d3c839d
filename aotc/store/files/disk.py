"""Reading files, and OS errors that say what to do. Writing: `aotc.store.files.writing`."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from aotc.errors import CorruptError, StoreError


def store_error(action: str, path: Path, error: OSError, hint: str = "") -> StoreError:
    no_locks = "this file system has no locks: put the store, AOTC_CACHE_DIR and TMPDIR on one that has"
    hints = {
        errno.ENOSPC: "the disk is full: free space, or use a folder on another disk",
        errno.EDQUOT: "the disk quota is used up: free space, or use a folder on another disk",
        errno.EROFS: "the file system is mounted read-only: use a folder that can be written",
        errno.EACCES: "give this user permission for it, or use a folder of its own",
        errno.EPERM: "give this user permission for it, or use a folder of its own",
        errno.ENOTDIR: "a file stands where a folder should be: move it away, or use another folder",
        errno.EEXIST: "a file stands where a folder should be: move it away, or use another folder",
        errno.EISDIR: "a folder stands where a file should be: move it away",
        errno.ELOOP: "a symbolic link stands where a file or folder should be: move it away",
        errno.ENOLCK: no_locks,
        errno.ENOSYS: no_locks,
        errno.EOPNOTSUPP: no_locks,
        errno.EMFILE: "the process has too many files open: raise `ulimit -n`",
        errno.EIO: "the disk reports an input/output error: check the disk",
        errno.ESTALE: "the network file system lost the file: try again",
    }
    return StoreError(
        f"cannot {action} {path}: {error.strerror or error}",
        hint=hints.get(error.errno or 0, hint),
        path=str(path),
        errno=error.errno,
    )


@contextlib.contextmanager
def typed_errors(action: str, path: Path, hint: str = "") -> Iterator[None]:
    """Turn an OSError within into a StoreError that names `path` and says what to do: `hint`, where that depends on
    what the path is for. Fields: `path`, `errno`."""
    try:
        yield
    except OSError as error:
        raise store_error(action, path, error, hint) from error


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a file for reading; a link only with `follow`.

    Raises OSError, and CorruptError for anything but a regular file (a pipe would block).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptError(
            f"{path} is not a regular file", path=str(path), expected="a regular file", actual="something else"
        )
    return os.fdopen(descriptor, "rb")


def read_limited(path: Path, limit: int) -> bytes:
    """The bytes of a small file. Raises OSError, and CorruptError where it is larger than `limit` bytes."""
    with open_regular(path) as stream:
        data = stream.read(min(os.fstat(stream.fileno()).st_size, limit) + 1)  # a read allocates what it is asked for
    if len(data) > limit:
        expected, actual = f"at most {limit} bytes", f"more than {limit} bytes"
        message = f"{path} has more than the {limit} bytes allowed for it"
        raise CorruptError(message, path=str(path), expected=expected, actual=actual)
    return data


def map_privately(stream: BinaryIO) -> mmap.mmap:
    """A file's bytes, mapped; a writer gets its own copy of a page. Raises OSError, which names the size."""
    try:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        size = os.fstat(stream.fileno()).st_size
        raise OSError(error.errno, f"unable to mmap {size} bytes: {error.strerror}") from error


def exists(path: Path) -> bool:
    """Raises StoreError if this user lacks the permission to find out, as in a folder without search permission."""
    with typed_errors("look at", path):
        return path.exists()


def files_in(folder: Path) -> list[Path]:
    """The paths in a folder, sorted; none if the folder is missing. Raises StoreError."""
    with typed_errors("look into", folder):
        return sorted(folder.iterdir()) if folder.is_dir() else []


def status_of(path: Path) -> os.stat_result | None:
    """The file's status, links not followed; None if the file is missing. Raises StoreError."""
    with typed_errors("look at", path):
        try:
            return path.lstat()
        except FileNotFoundError:
            return None
