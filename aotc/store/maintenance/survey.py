"""The files in a store's folders, classified by name, for gc and fsck."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from aotc.store.files.disk import files_in, typed_errors
from aotc.store.files.writing import is_temporary_name

StoreFileKind = Literal["blob", "unit", "unit lock", "lease", "log", "temporary", "own", "folder", "foreign"]

_HEX = "[0-9a-f]{64}"
_NAMES: dict[str, dict[str, StoreFileKind]] = {
    "": {"oci-layout|index.json": "own", r"blobs|\.aotc|lost\+found": "folder"},
    "blobs": {"sha256": "folder"},
    "blobs/sha256": {_HEX: "blob"},
    ".aotc": {
        r"(index|gc|fetch-[0-9a-f])\.lock(\.holder)?|index\.json\.damaged-[0-9a-f]{12}|probe-[0-9a-f]{16}": "own",
        "units|writers|plans|logs|remembered": "folder",
    },
    ".aotc/units": {rf"{_HEX}\.json": "unit", rf"{_HEX}\.lock": "unit lock"},
    ".aotc/writers": {"[0-9a-f]{16}": "lease"},
    ".aotc/plans": {r".+\.json": "own"},
    ".aotc/logs": {r".+\.log": "log"},
    ".aotc/remembered": {r".+\.(json|yaml|log|failed|lock|lock\.holder)": "own"},
}
"""For each folder of a store, the names that aotc gives there. Other files belong to other programs."""


class StoreFile(NamedTuple):
    """A file in a store, its path relative to the store; of a link to a file, size and time are the file's.

    `written`: seconds since the epoch. A blob or unit that is wanted again gets a new time.
    """

    kind: StoreFileKind
    name: str
    size: int
    written: float

    @property
    def digest(self) -> str:
        """The digest or key in the name of a blob, a unit or its lock."""
        return f"sha256:{Path(self.name).stem}"


def survey(root: Path) -> list[StoreFile]:
    """Every file in the folders of the store at `root`, and whatever else is there as "foreign". Raises StoreError."""
    return [found for folder in _NAMES for path in files_in(root / folder) for found in _look_at(root, folder, path)]


def _look_at(root: Path, folder: str, path: Path) -> Iterator[StoreFile]:
    kind = _kind_of(folder, path.name)
    with typed_errors("look at", path):
        try:
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode) and kind != "folder" and path.is_file():
                status = path.stat()
        except FileNotFoundError:
            return  # it has just gone
    expected = stat.S_ISDIR if kind == "folder" else stat.S_ISREG
    if not expected(status.st_mode):
        kind = "foreign"
    if kind != "folder":
        yield StoreFile(kind, os.path.relpath(path, root), status.st_size, status.st_mtime)


def _kind_of(folder: str, name: str) -> StoreFileKind:
    if is_temporary_name(name):
        return "temporary"
    return next((kind for pattern, kind in _NAMES[folder].items() if re.fullmatch(pattern, name)), "foreign")
