"""Whether files are there, and which. A load asks by opening them."""

from __future__ import annotations

import os
from pathlib import Path

from aotc.store.files.disk import typed_errors


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
