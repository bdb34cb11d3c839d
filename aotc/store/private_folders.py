"""Folders of one process for hot copies, where the cache folder cannot be used; each goes when its process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from aotc.store.disk import typed_errors
from aotc.store.locks import held_folder


def private_parents() -> Iterator[Path]:
    """The folders in which one may be made, the best first."""
    yield Path("/dev/shm")
    with contextlib.suppress(OSError):  # where no temporary folder can be written
        yield Path(tempfile.gettempdir())


def make_private_folder(parent: Path) -> Path:
    """A new folder in `parent`, removed when this process ends. Raises StoreError."""
    with typed_errors("write in", parent):
        private, _ = held_folder("aotc-hot-", parent)  # until this process ends: the lock says that it is in use
    atexit.register(_remove_in(os.getpid()), private)
    return private


def _remove_in(pid: int) -> Callable[[Path], None]:
    def remove(private: Path) -> None:
        if os.getpid() == pid:  # a forked child must not take away what its parent has mapped
            shutil.rmtree(private, ignore_errors=True)

    return remove
