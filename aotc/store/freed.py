"""What a collection did, or would do: typed, so that printing is somebody else's job."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from aotc.records import Record
from aotc.store.disk import open_folder, typed_errors

Kind = Literal["tag", "signature", "unit", "blob", "temporary", "lock", "log", "work folder", "hot copy", "document"]


class Removal(Record, frozen=True):
    """One thing that was removed: its path or tag, why, and the bytes of disk that this freed."""

    kind: Kind
    name: str
    reason: str
    size: int = 0


class Freed(Record, frozen=True):
    """The result of a collection; all sizes in bytes.

    `kept` is what stays, `waiting` what nothing names any more but a reader or a running writer may still need (a later
    collection frees it), `over` by how much a size limit is missed, `writers` the running ones that were spared.
    """

    folder: str
    removed: tuple[Removal, ...]
    kept: int
    waiting: int = 0
    over: int = 0
    writers: tuple[str, ...] = ()
    dry_run: bool = False

    @property
    def freed(self) -> int:
        return sum(removal.size for removal in self.removed)


def remove_file(root: Path, path: Path) -> None:
    """Remove a file that may be gone already, and that no link between `root` and it leads to. Raises StoreError."""
    with typed_errors("remove", path), contextlib.suppress(FileNotFoundError), _opened(root, path.parent) as folder:
        os.unlink(path.name, dir_fd=folder)


def remove_tree(root: Path, path: Path) -> None:
    """As `remove_file`, a folder with what is in it. Raises StoreError."""
    with typed_errors("remove", path), contextlib.suppress(FileNotFoundError), _opened(root, path.parent) as folder:
        try:
            shutil.rmtree(path.name, dir_fd=folder)
        except FileNotFoundError:
            shutil.rmtree(path.name, ignore_errors=True, dir_fd=folder)


@contextlib.contextmanager
def _opened(root: Path, folder: Path) -> Iterator[int]:
    descriptor = open_folder(root, folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def size_of_tree(path: Path) -> int:
    """Bytes of the files in a folder, as far as they can be seen."""
    total = 0
    for found in path.rglob("*"):
        try:
            total += found.lstat().st_size if not found.is_dir() else 0
        except OSError:
            continue
    return total
