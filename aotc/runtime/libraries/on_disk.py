"""Files of a library that must lie beside one another, by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from aotc.errors import LibraryError
from aotc.store.files.temporary_folders import TemporaryFolder


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
