"""Leases: how gc knows which writers are running, and since when.

STORE/.aotc/writers/<16 hex>      locked by its writer as long as it runs; names the process and its start
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from aotc.errors import CorruptError
from aotc.machine.locks import lock
from aotc.records import Record
from aotc.store.files.disk import open_regular, status_of, typed_errors
from aotc.store.files.store_locks import is_held, this_process
from aotc.store.files.writing import make_folder

_NAME = re.compile(r"[0-9a-f]{16}")


class Lease(Record, frozen=True):
    """A writer: who it is, since when it runs (seconds since the epoch, by the file system), whether it lives."""

    path: str
    holder: str
    since: float
    alive: bool


@contextlib.contextmanager
def lease(folder: Path, what: str) -> Iterator[None]:
    """Register as a running writer; `what` names its kind. Raises StoreError."""
    make_folder(folder)
    path = folder / secrets.token_hex(8)
    with typed_errors("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with typed_errors("write", path):
            lock(descriptor)
            os.write(descriptor, f"{what}, {this_process()}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        with typed_errors("close", path):
            os.close(descriptor)


def leases(folder: Path) -> list[Lease]:
    """Every lease in the folder, those of killed writers too; other files are skipped. Raises StoreError."""
    with typed_errors("look into", folder):
        paths = sorted(folder.iterdir()) if folder.exists() else []
    return [found for path in paths if is_lease_name(path.name) and (found := _read(path)) is not None]


def is_lease_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _read(path: Path) -> Lease | None:
    alive = is_held(path)
    status = status_of(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return None  # it ended meanwhile, or no writer made it
    return Lease(path=str(path), holder=_holder(path), since=status.st_mtime, alive=alive)


def _holder(path: Path) -> str:
    try:
        with open_regular(path, follow=False) as stream:
            said = stream.read(200).decode(errors="replace")
    except (OSError, CorruptError):  # another user's: it counts all the same
        said = ""
    return said or "another aotc process"
