"""Temporary folders: those that a killed process has left are removed by the next process that makes one."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from aotc.machine.locks import lock

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TemporaryFolder:
    """An empty folder, locked until it is removed or its process and all that were forked from it have ended."""

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        """In `parent`, else where the system keeps temporary files. Raises OSError."""
        _remove_abandoned(Path(parent or tempfile.gettempdir()), prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            with contextlib.suppress(FileNotFoundError):  # removed by another process before it was locked
                self._lock = os.open(self.path, _FOLDER)
                with contextlib.suppress(OSError):  # a file system without locks, where nothing is taken for abandoned
                    lock(self._lock, shared=True)
                if os.fstat(self._lock).st_nlink:
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Call it once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove this user's folders of that prefix that no process has locked; folders that cannot be removed stay."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, _FOLDER)
            try:
                if lock(descriptor, wait=False) and os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
