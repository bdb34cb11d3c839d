"""Files of a library that need a disk: where memory may not be executed, and where other files must lie beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from aotc.errors import Issue, LibraryError
from aotc.store.files.temporary_folders import TemporaryFolder


def file_on_disk(is_executable: Callable[[int], bool]) -> BinaryIO:
    """An empty file without a path in a temporary folder that code can be mapped from. Raises LibraryError."""
    issues = []
    for folder in (tempfile.gettempdir, lambda: "/dev/shm", lambda: "/var/tmp"):
        try:
            stream = tempfile.TemporaryFile(dir=folder())  # noqa: SIM115
            if is_executable(stream.fileno()):
                return stream
            issues.append(Issue("code may not be mapped from it: mounted noexec, or by a security policy", folder()))
        except OSError as error:
            issues.append(Issue(str(error)))
    raise LibraryError(
        "no file can be made that code may be mapped from, neither in memory nor on a disk",
        issues=tuple(issues),
        hint="let TMPDIR be a folder that can be written and is not mounted noexec",
    )


@contextmanager
def side_by_side(streams: Mapping[str, BinaryIO]) -> Iterator[Path]:
    """A folder with the open files by their names, within the context. Raises LibraryError."""
    folder = private_folder()
    try:
        for name, stream in streams.items():
            (folder.path / name).symlink_to(f"/proc/self/fd/{stream.fileno()}")
        yield folder.path
    finally:
        folder.remove()


def private_folder() -> TemporaryFolder:
    """Raises LibraryError."""
    for folder in (None, "/dev/shm"):
        try:
            return TemporaryFolder("aotc-library-", folder)
        except OSError as error:
            reason = error
    raise LibraryError(
        f"a library that reads files beside itself needs a folder, and none can be made: {reason}",
        hint="let TMPDIR be a folder that can be written",
    ) from reason
