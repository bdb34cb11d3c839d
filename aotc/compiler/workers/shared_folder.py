"""The folder that the units of one build share on one machine."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aotc.compiler.unit import SHARED_PICKS
from aotc.store.files.disk import typed_errors
from aotc.store.files.store_locks import held_folder

KERNELS_LIMIT = 2 << 30
"""Bytes of compiled kernels, above which later units begin with an empty cache."""


class SharedFolder:
    """A folder created at the first need, and removed at the end of the build, or, if that was killed, by `aotc gc`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[Path, int] | None = None
        self._generation = 0
        self._users: Counter[int] = Counter()

    @property
    def path(self) -> Path:
        """The folder, created if needed. Raises StoreError where the temporary folder cannot be written."""
        with self._lock:
            return self._made()

    @property
    def picks(self) -> Path:
        return self.path / SHARED_PICKS

    @contextmanager
    def kernels(self) -> Iterator[Path]:
        """Triton's cache, for one unit. Units can share it: it is content-addressed, and its files appear whole.

        It holds every candidate that was tried. Beyond KERNELS_LIMIT it is replaced, and removed by its last user.
        """
        with self._lock:
            if _size(self._cache(self._generation)) > KERNELS_LIMIT:
                self._generation += 1
                self._remove_unused(self._generation - 1)
            mine = self._generation
            cache = self._cache(mine)
            self._users[mine] += 1
        try:
            yield cache
        finally:
            with self._lock:
                self._users[mine] -= 1
                self._remove_unused(mine)

    def remove(self) -> None:
        with self._lock:
            if self._held is not None:
                folder, descriptor = self._held
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)
                self._held = None

    def _remove_unused(self, generation: int) -> None:
        if generation != self._generation and not self._users[generation]:
            shutil.rmtree(self._cache(generation), ignore_errors=True)

    def _cache(self, generation: int) -> Path:
        return self._made() / f"triton-{generation}"

    def _made(self) -> Path:
        if self._held is None:
            with typed_errors("write in", Path(tempfile.gettempdir())):
                self._held = held_folder()
        return self._held[0]


def _size(folder: Path) -> int:
    """The bytes of all files in the folder; files may appear and vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(parent, name).lstat().st_size
            except FileNotFoundError:
                continue
    return total
