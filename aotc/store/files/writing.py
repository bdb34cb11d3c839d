"""Files that are never seen half-written."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from aotc.errors import StoreError
from aotc.machine.locks import lock
from aotc.store.files.disk import status_of, typed_errors

TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(r"\.tmp-([0-9a-f]{16}|[0-9a-f]{64})")

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def make_folder(path: Path) -> None:
    with typed_errors("make the folder", path):
        path.mkdir(parents=True, exist_ok=True)


def require_room(stream: BinaryIO, path: Path, size: int) -> None:
    """Raises StoreError where there is no room for `size` more bytes in the open file `path`: before they fill the
    disk, or the memory behind it."""
    with typed_errors("write", path):
        system = os.fstatvfs(stream.fileno())
        free = system.f_bavail * system.f_frsize
        if system.f_blocks and size > free:
            full = os.strerror(errno.ENOSPC)
            raise OSError(errno.ENOSPC, f"{full}: {size} bytes are to be written, and {free} are free")


def open_folder(root: Path, folder: Path) -> int:
    """An open descriptor of `folder`, which is `root` or inside it, for calls that take a `dir_fd`.

    `root` may be reached through a link. No folder below it may be one: a link may lead to a folder of another program.
    Raises OSError.
    """
    descriptor = os.open(root, _FOLDER)
    for part in folder.relative_to(root).parts:
        try:
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def refuse_links(root: Path, folders: Iterable[str]) -> None:
    """Raises StoreError where one of the folders in `root`, which something is to be removed from, is a link."""
    for path in (root / folder for folder in folders):
        status = status_of(path)
        if status is not None and stat.S_ISLNK(status.st_mode):
            raise StoreError(
                f"{path} is a link to {path.readlink()}, and who else needs what lies there is not known",
                hint=f"let a folder of its own stand there; {root} as a whole may be behind a link",
                path=str(path),
            )


def remove_file(root: Path, path: Path) -> None:
    """Remove a file, if it exists, unless a folder between `root` and it is a link. Raises StoreError."""
    with typed_errors("remove", path), contextlib.suppress(FileNotFoundError):
        folder = open_folder(root, path.parent)
        try:
            os.unlink(path.name, dir_fd=folder)
        finally:
            os.close(folder)


def fsync_folder(path: Path) -> None:
    """Make a rename in `path` survive a power cut."""
    descriptor = os.open(path, _FOLDER)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name() -> str:
    return TEMPORARY_PREFIX + secrets.token_hex(8)


def is_temporary_name(name: str) -> bool:
    """Whether a draft or a download has such a name."""
    return _TEMPORARY.fullmatch(name) is not None


class Draft:
    """A file that is being written under a temporary name, beside where it will stand."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self.stream = stream

    def keep_as(self, destination: Path, *, durable: bool = True) -> None:
        """Give the finished file its name, at once and, if `durable`, for good: it outlives a power cut.

        Raises StoreError; the draft is then removed.
        """
        with typed_errors("write", destination):
            self.stream.flush()
            written, there = self.stream.tell(), os.fstat(self.stream.fileno()).st_size
            if written != there:
                raise StoreError(
                    f"{written} bytes were written to {self.path}, and {there} are there",
                    hint="the file system loses data: use another one",
                    path=str(self.path),
                )
            if durable:
                os.fsync(self.stream.fileno())
            # Before it is closed: until it has its name, the lock on it says that its writer lives.
            self.path.replace(destination)
            self.stream.close()
            if durable:
                fsync_folder(destination.parent)


@contextlib.contextmanager
def draft(folder: Path, mode: int = 0o666) -> Iterator[Draft]:
    """A temporary in `folder`, removed at the end unless it was kept. Raises StoreError."""
    make_folder(folder)
    with typed_errors("write in", folder):
        path, descriptor = _open_locked(folder, mode)
    stream = os.fdopen(descriptor, "wb")
    try:
        with typed_errors("write", path):
            yield Draft(path, stream)
    finally:
        with contextlib.suppress(OSError):  # closing flushes: a full disk was reported already
            stream.close()
        with contextlib.suppress(OSError):
            path.unlink()


def _open_locked(folder: Path, mode: int) -> tuple[Path, int]:
    """A new temporary, under a lock that lasts as long as its writer: an unlocked one is left by a killed process."""
    while True:
        path = folder / temporary_name()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            lock(descriptor)
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        os.close(descriptor)  # cleaned away before it was locked


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace the file at `path`: a reader sees the old bytes or the new ones; if `durable`, after a power cut, too.

    Raises StoreError.
    """
    with draft(path.parent) as temporary:
        temporary.stream.write(data)
        temporary.keep_as(path, durable=durable)


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a person named: as `write_atomically`, but what is not a regular file, as a pipe, stays what
    it is and is written to, as is an open file of this process (/dev/stdout), and of a link the target is replaced.
    Raises StoreError, also where the file's folder is missing: that is more often mistyped than meant."""
    if is_replaceable(path):
        target = path.resolve()
        with typed_errors("write", path):
            if not target.parent.exists():
                raise StoreError(
                    f"cannot write {path}: there is no folder {target.parent}", hint="make it, or name another file"
                )
        write_atomically(target, data)
        return
    with typed_errors("write", path):
        if (number := _descriptor_of(path)) is None:
            path.write_bytes(data)
            return
        with os.fdopen(os.dup(number), "wb") as stream:  # opened anew it would begin where its other writers began
            stream.write(data)


def is_replaceable(path: Path) -> bool:
    """Whether what stands at `path` is a regular file, or nothing. Raises StoreError."""
    with typed_errors("write", path):
        return _descriptor_of(path) is None and (path.is_file() or not path.exists())


def _descriptor_of(path: Path) -> int | None:
    """Which of this process's open files the path names."""
    if named := re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", str(path)):
        return int(named[1])
    return {"/dev/stdout": 1, "/dev/stderr": 2}.get(str(path))
