"""Blobs too large to be read at once: hashed in threads of their own while they are read, unpacked or written."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Protocol

from aotc.digest import CHUNK
from aotc.store.files.disk import typed_errors

HASHED_ASIDE = 1 << 20  # bytes; hashing fewer takes less time than a thread, which several files at once do not need


class SupportsRead(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class Hash:
    """sha256 of a stream, computed in a thread of its own while the next piece is read, packed or written.

    hashlib and zstandard release the GIL. Small pieces are hashed at once: a thread costs more than they do.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self.size = 0

    def __enter__(self) -> Hash:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def update(self, data: bytes) -> None:
        self._wait()
        self.size += len(data)
        if len(data) < HASHED_ASIDE:
            self._hash.update(data)
        else:
            self._pending = self._thread.submit(self._hash.update, data)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    @property
    def digest(self) -> str:
        self._wait()
        return "sha256:" + self._hash.hexdigest()


class _Hashing:
    """How much has passed, and its digest."""

    def __init__(self, hashed: Hash) -> None:
        self._hash = hashed

    @property
    def size(self) -> int:
        return self._hash.size

    @property
    def digest(self) -> str:
        return self._hash.digest


class HashingReader(_Hashing):
    """Reads and hashes a stream. An error of the stream names `path`, not the file that is being written."""

    def __init__(self, stream: SupportsRead, path: Path, hashed: Hash) -> None:
        super().__init__(hashed)
        self._stream = stream
        self._path = path

    def read(self, size: int = -1) -> bytes:
        with typed_errors("read", self._path):
            data = self._stream.read(size)
        self._hash.update(data)
        return data

    def drain(self, limit: int) -> None:
        """Read to the end, or beyond `limit` bytes where the file is growing."""
        while self.size <= limit and self.read(CHUNK):
            pass


class HashingWriter(_Hashing):
    """Writes to a stream, hashing what passes."""

    def __init__(self, stream: BinaryIO, hashed: Hash) -> None:
        super().__init__(hashed)
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._stream.write(data)
        return len(data)


def copy(source: BinaryIO, sink: BinaryIO, size: int, path: Path) -> str:
    """Copy `size` bytes of the blob at `path`; the digest."""
    with Hash() as hashed:
        reader = HashingReader(source, path, hashed)
        while hashed.size < size and (chunk := reader.read(CHUNK)):
            sink.write(chunk)
        return hashed.digest
