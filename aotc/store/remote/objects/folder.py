"""Objects of a folder on this host, `file:///FOLDER`: a store's folder as a remote, to copy from and to.

Others may work in that store meanwhile: files appear whole, and `index.json` is replaced under the store's own lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from aotc.digest import sha256_bytes
from aotc.errors import ReferenceFormatError
from aotc.store.files.disk import open_regular, read_limited, typed_errors
from aotc.store.files.store_locks import locked
from aotc.store.files.writing import draft, remove_file, write_atomically
from aotc.store.remote.interface import CHUNK, Traffic
from aotc.store.remote.objects.object_interface import StoredObject, Version

LOCK_TIMEOUT = 60.0  # seconds; the lock is held for a few milliseconds


class FolderObjects:
    """As `Objects`. It raises StoreError, since no trouble of a disk is transient."""

    writable = True
    conditions: Literal["kept"] = "kept"

    def __init__(self, url: str, traffic: Traffic) -> None:
        self.url = url
        self._root = Path(url.removeprefix("file://"))
        self._traffic = traffic
        if not self._root.is_absolute():
            raise ReferenceFormatError(f"{url!r} names no folder", hint="write file:///FOLDER, with three slashes")

    def read(self, name: str, limit: int) -> StoredObject | None:
        with self._typed("read", name) as path:
            try:
                data = read_limited(path, limit)
            except FileNotFoundError:
                return None
        self._traffic.count(received=len(data))
        return StoredObject(data, {"sha256": sha256_bytes(data)})

    def size(self, name: str) -> int | None:
        with self._typed("look for", name) as path:
            return path.stat().st_size if path.is_file() else None

    @contextlib.contextmanager
    def open(self, name: str, offset: int) -> Iterator[Iterator[bytes] | None]:
        with self._typed("read", name) as path:
            try:
                stream = open_regular(path)
            except FileNotFoundError:
                yield None
                return
            with stream:
                stream.seek(offset)
                yield self._pieces(stream)

    def put(self, name: str, stream: BinaryIO, size: int) -> None:
        with self._typed("write", name) as path, draft(path.parent) as temporary:
            while data := stream.read(CHUNK):
                temporary.stream.write(data)
            temporary.keep_as(path)
        self._traffic.count(sent=size)

    def replace(self, name: str, data: bytes, seen: Version | None) -> bool:
        with locked(self._root / ".aotc" / "index.lock", LOCK_TIMEOUT):
            found = self.read(name, 1 << 30)
            if (None if found is None else found.version) != seen:
                return False
            write_atomically(self._root / name, data)
        self._traffic.count(sent=len(data))
        return True

    def remove(self, name: str) -> None:
        remove_file(self._root, self._root / name)

    def _pieces(self, stream: BinaryIO) -> Iterator[bytes]:
        while data := stream.read(CHUNK):
            self._traffic.count(received=len(data))
            yield data

    @contextlib.contextmanager
    def _typed(self, action: str, name: str) -> Iterator[Path]:
        self._traffic.count(requests=1)
        with typed_errors(action, self._root / name):
            yield self._root / name
