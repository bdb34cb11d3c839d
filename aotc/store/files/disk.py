"""Reading files, and OS errors that say what to do. Writing: `aotc.store.files.writing`."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from aotc.errors import CorruptError


@contextlib.contextmanager
def typed_errors(action: str, path: Path, hint: str = "") -> Iterator[None]:
    """Turn an OSError within into a StoreError that names `path` and says what to do: `hint`, where that depends on
    what the path is for. Fields: `path`, `errno`."""
    try:
        yield
    except OSError as error:
        from aotc.store.files.os_errors import store_error

        raise store_error(action, path, error, hint) from error


def exists(path: Path) -> bool:
    """Raises StoreError where this user may not know, as in a folder without search permission."""
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
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise CorruptError(
            f"{path} has more than the {limit} bytes allowed for it",
            path=str(path),
            expected=f"at most {limit} bytes",
            actual=f"more than {limit} bytes",
        )
    return data
