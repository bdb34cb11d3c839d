"""Reading files, and OS errors that say what to do. Writing: `aotc.store.files.writing`."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def typed_errors(action: str, path: Path, hint: str = "") -> Iterator[None]:
    """Turn an OSError within into a StoreError that names `path` and says what to do: `hint`, where that depends on
    what the path is for. Fields: `path`, `errno`."""
    try:
        yield
    except OSError as error:
        from aotc.store.files.os_errors import store_error

        raise store_error(action, path, error, hint) from error


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a file for reading; a link only with `follow`.

    Raises OSError, and CorruptError for anything but a regular file (a pipe would block).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        from aotc.store.files.os_errors import not_as_expected

        raise not_as_expected(path, "is not a regular file", "a regular file", "something else")
    return os.fdopen(descriptor, "rb")


def read_limited(path: Path, limit: int) -> bytes:
    """The bytes of a small file. Raises OSError, and CorruptError where it is larger than `limit` bytes."""
    with open_regular(path) as stream:
        data = stream.read(min(os.fstat(stream.fileno()).st_size, limit) + 1)  # a read allocates what it is asked for
    if len(data) > limit:
        from aotc.store.files.os_errors import not_as_expected

        expected, actual = f"at most {limit} bytes", f"more than {limit} bytes"
        raise not_as_expected(path, f"has more than the {limit} bytes allowed for it", expected, actual)
    return data


def map_privately(stream: BinaryIO) -> mmap.mmap:
    """A file's bytes, mapped; whoever writes to them gets a page of his own. Raises OSError, which tells the size."""
    try:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        size = os.fstat(stream.fileno()).st_size
        raise OSError(error.errno, f"unable to mmap {size} bytes: {error.strerror}") from error
