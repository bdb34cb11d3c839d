"""Compiled files of this machine, by the digest of their inputs: shared by the units of a build and by later builds.
The cache only saves time: if its folder cannot be used, files are compiled again, with equal bytes."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from aotc.digest import sha256_file
from aotc.errors import StoreError
from aotc.machine.locks import waiting
from aotc.store.cache_folder import cache_folder
from aotc.store.files.disk import files_in, typed_errors
from aotc.store.files.store_locks import locked
from aotc.store.files.writing import draft, remove_file
from aotc.store.layout.names import is_digest

VERSION = "compiled-v1"
FOLDER = "/aotc"
"""Replaces the build's cache folder in file names that are compiled in, as by `__FILE__` and assertions."""
UNUSED_DAYS = 30
"""Entries that are unused for this many days are removed when one is added."""

_LOCK_TIMEOUT = 600.0  # seconds; the lock is held while one file is compiled
_LOCK = ".lock"
_DAY = 86_400.0

_log = logging.getLogger("aotc")


class CompileCache:
    """Files in a folder, each compiled once, and verified at each use.

    folder/                      AOTC_CACHE_DIR
    └── compiled-v1/             used only if no other user can write here: its code goes into artifacts
        └── <key>/
            ├── .lock            held while the file is compiled
            └── <sha256 hex>     the file, named by its digest

    A key is the digest (`sha256_json`) of all inputs that the bytes of the file depend on.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def fetch(self, key: str, destination: Path, make: Callable[[Path], None]) -> bool:
        """Copy the key's file to `destination`, or call `make` to create it there. Returns whether it was in the cache.

        If several processes ask at once, one makes the file and the others wait. Errors of `make` pass through.
        """
        with ExitStack() as alone:
            try:
                with waiting("for another unit, which compiles the same"):
                    alone.enter_context(locked(self._root() / _name(key) / _LOCK, _LOCK_TIMEOUT))
                if known := self.get(key):
                    shutil.copyfile(known, destination)
                    return True
            except (StoreError, OSError) as error:
                _log.debug("the cache of compiled files is not used: %s", error)
            make(destination)
            try:
                self.put(key, destination)
            except (StoreError, OSError) as error:
                _log.debug("the compiled file is not kept in the cache: %s", error)
        return False

    def get(self, key: str) -> Path | None:
        """The key's file, or None if it is not in the cache or is damaged. Raises StoreError."""
        entry = self._root() / _name(key)
        with typed_errors("read in", entry):
            for path in files_in(entry):
                if path.name.startswith("."):
                    continue
                if path.is_file() and not path.is_symlink() and sha256_file(path) == f"sha256:{path.name}":
                    os.utime(entry)
                    return path
                if is_digest(f"sha256:{path.name}"):
                    remove_file(self._root(), path)  # damaged
        return None

    def put(self, key: str, file: Path) -> None:
        """Store a copy of `file` under the key. Raises StoreError."""
        root = self._root()
        with draft(root / _name(key)) as copy, file.open("rb") as stream:
            shutil.copyfileobj(stream, copy.stream)
            copy.keep_as(copy.path.with_name(_name(sha256_file(file))))
        self._forget_unused(root)

    def _root(self) -> Path:
        """The cache's folder. Raises StoreError where other users can write in it."""
        root = (self._folder or cache_folder()) / VERSION
        with typed_errors("use", root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = root.lstat()
        writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or writable_by_others:
            raise StoreError(f"{root} is not a folder that only this user can write", path=str(root))
        return root

    def _forget_unused(self, root: Path) -> None:
        with typed_errors("clean", root):
            for entry in root.iterdir():
                if entry.stat().st_mtime < time.time() - UNUSED_DAYS * _DAY:
                    shutil.rmtree(entry, ignore_errors=True)


def _name(digest: str) -> str:
    return digest.removeprefix("sha256:")
