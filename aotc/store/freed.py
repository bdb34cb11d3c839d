"""For the hot copies only, until they go."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from aotc.store.disk import open_folder, typed_errors
from aotc.store.disk import remove_file as remove_file
from aotc.store.maintenance.reports import Freed as Freed
from aotc.store.maintenance.reports import Removal as Removal


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
