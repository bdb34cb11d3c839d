"""Files without a name that code is mapped from: in memory, sealed, or where that may not be executed, on a disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from aotc.errors import AotcError, Issue, LibraryError
from aotc.records import File


@contextmanager
def typed_errors_of(file: File) -> Iterator[None]:
    """Raise LibraryError where a limit of the process or a full disk keeps a file from memory."""
    try:
        yield
    except OSError as error:
        if isinstance(error, AotcError):
            raise
        raise LibraryError(
            f"{file.name} ({file.size} bytes) cannot be written to memory or a temporary file: {error.strerror}",
            hint="`Too many open files`: raise `ulimit -n`; `File too large`: raise `ulimit -f`; `No space left`: free "
            "some in TMPDIR",
        ) from error


_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_NOEXEC_SEAL = 0x8
"""`MFD_NOEXEC_SEAL` of memfd_create(2), from Linux 6.3 on: the file may be mapped as code, and not be started as a
program. Hosts with `vm.memfd_noexec=2` allow no other."""


def anonymous_file(name: str) -> BinaryIO:
    """An empty file without a path that code can be mapped from: in memory, else in a temporary folder."""
    if _memory_is_executable():
        return os.fdopen(_memfd(name), "w+b")
    return _file_on_disk()


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)  # an older kernel


@functools.cache
def _memory_is_executable() -> bool:
    """Whether code may be mapped from a memfd: a sandbox may have none, a security policy may forbid it."""
    try:
        descriptor = _memfd("aotc")
    except OSError:
        return False
    try:
        return _is_executable(descriptor)
    finally:
        os.close(descriptor)


def _is_executable(descriptor: int) -> bool:
    """Whether code may be mapped from an empty file, which stays empty."""
    os.ftruncate(descriptor, mmap.PAGESIZE)
    try:
        mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
    except PermissionError:
        return False
    finally:
        os.ftruncate(descriptor, 0)
    return True


def _file_on_disk() -> BinaryIO:
    """An empty file without a path in a temporary folder that code can be mapped from. Raises LibraryError."""
    import tempfile

    issues = []
    for folder in (tempfile.gettempdir, lambda: "/dev/shm", lambda: "/var/tmp"):
        try:
            stream = tempfile.TemporaryFile(dir=folder())  # noqa: SIM115
            if _is_executable(stream.fileno()):
                return stream
            issues.append(Issue("code may not be mapped from it: mounted noexec, or by a security policy", folder()))
        except OSError as error:
            issues.append(Issue(str(error)))
    raise LibraryError(
        "no file can be made that code may be mapped from, neither in memory nor on a disk",
        issues=tuple(issues),
        hint="let TMPDIR be a folder that can be written and is not mounted noexec",
    )


def seal(stream: BinaryIO) -> None:
    """Nothing writes to the file any more. One on a disk has no seals."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(stream, fcntl.F_ADD_SEALS, _SEALS)


_numbers = itertools.count(1)


def path_of(stream: BinaryIO) -> str:
    """A path of an open file that no other was opened by: glibc takes a path for the library that it was opened by
    first, whatever stands there now, and numbers of descriptors come back."""
    spelling = "".join("./" if bit == "1" else "/" for bit in f"{next(_numbers):b}")
    return f"/proc/self/fd/{spelling}{stream.fileno()}"
