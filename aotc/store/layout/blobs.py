"""Immutable bytes under their own sha256."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

import zstandard

from aotc.digest import CHUNK, sha256_bytes
from aotc.errors import StoreError
from aotc.records import Artifact, File, Record
from aotc.store.files.disk import open_regular, read_limited, typed_errors
from aotc.store.files.writing import draft, require_room, write_atomically
from aotc.store.layout.blob_reader import BlobReader, expect
from aotc.store.layout.bundle import each_file
from aotc.store.layout.names import check_file_name
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.streams import Hash, HashingReader, HashingWriter

DEFAULT_LEVEL = 10
SMALL, SMALL_LEVEL = 1 << 20, 18  # bytes; for so few, a tenth less takes at most a quarter of a second


class Blob(Record, frozen=True):
    """The name of a blob: the digest and the size of its bytes."""

    digest: str
    size: int


def describe(media_type: str, blob: Blob, annotations: dict[str, str] | None = None) -> Descriptor:
    return Descriptor(media_type=media_type, digest=blob.digest, size=blob.size, annotations=annotations)


class Blobs(BlobReader):
    """The blobs of a store, read and written.

    folder/                    STORE/blobs
    └── sha256/
        ├── <64 hex>           bytes whose sha256 this is; written once, never changed
        └── .tmp-<16 hex>      being written, or left by a killed process: never read

    `sharing` gives the lock that keeps gc out for a moment.
    """

    def __init__(self, folder: Path, sharing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        super().__init__(folder)
        self._sharing = sharing

    def keep(self, digest: str, size: int) -> bool:
        """Whether the blob exists. If so, its time is set to now, so gc spares it like a new one.

        A blob whose time cannot be set, as another user's, counts as missing: written again, it is spared too.
        Raises StoreError.
        """
        if not self.has(digest, size):
            return False
        with self._sharing():  # gc looks at the time and removes the blob in one go, alone
            try:
                os.utime(self.path(digest))
            except OSError:
                return False
        return True

    def touch(self, digest: str, limit: int) -> None:
        """Mark a blob of at most `limit` bytes as written now, if it exists, so that gc keeps it. Raises StoreError."""
        path = self.path(digest)
        with typed_errors("write", path):
            try:
                os.utime(path)
            except PermissionError:  # another user's
                write_atomically(path, read_limited(path, limit))
            except FileNotFoundError:
                return

    def put_bytes(self, data: bytes) -> Blob:
        """Write a blob, unless it is there. Raises StoreError."""
        blob = Blob(digest=sha256_bytes(data), size=len(data))
        if not self.keep(blob.digest, blob.size):
            with draft(self.folder / "sha256") as temporary:
                temporary.stream.write(data)
                temporary.keep_as(self.path(blob.digest))
        return blob

    def put_file_zstd(self, path: Path, level: int | None = None, *, name: str | None = None) -> File:
        """Compress a file of any size into a blob; the record calls it `name`, or as it is called.

        Equal bytes give an equal blob under one version of zstd: a level that follows from the size where none is asked
        for, one thread, the size in the frame, no checksum (the digest is one). Raises StoreError, CorruptError for an
        unsafe name.
        """
        with typed_errors("read", path), open_regular(path) as source:
            size = os.fstat(source.fileno()).st_size
            return self._put_zstd(path.name if name is None else name, source, size, level, path)

    def put_bytes_zstd(self, name: str, data: bytes) -> File:
        """As `put_file_zstd`, of a file's bytes."""
        return self._put_zstd(name, io.BytesIO(data), len(data), None, Path(name))

    def _put_zstd(self, name: str, source: BinaryIO, size: int, level: int | None, path: Path) -> File:
        check_file_name(name)
        with draft(self.folder / "sha256") as temporary:
            with Hash() as raw_hash, Hash() as packed_hash:
                raw, packed = HashingReader(source, path, raw_hash), HashingWriter(temporary.stream, packed_hash)
                _compress(raw, packed, size, _level(size) if level is None else level, path)
            if not self.keep(packed.digest, packed.size):
                temporary.keep_as(self.path(packed.digest))
        return File(name=name, digest=raw.digest, size=raw.size, blob=packed.digest, blob_size=packed.size)

    def put_copy(self, path: Path, blob: Blob) -> bool:
        """Copy the blob at `path`, as another store has it, checked; False where it was there already.

        Raises CorruptError, StoreError.
        """
        if self.keep(blob.digest, blob.size):
            return False
        with typed_errors("read", path), open_regular(path) as source, draft(self.folder / "sha256") as temporary:
            with Hash() as hashed:
                shutil.copyfileobj(HashingReader(source, path, hashed), temporary.stream, CHUNK)
            expect("digest", blob.digest, hashed.digest, path)
            temporary.keep_as(self.path(blob.digest))
        return True

    def extract(self, file: File, destination: Path) -> None:
        """Decompress a blob to the read-only file `destination`, which appears whole and checked, or not at all.

        Raises as `unpack` does.
        """
        with draft(destination.parent, mode=0o444) as temporary:
            require_room(temporary.stream, destination, file.size)
            self.unpack(file, temporary.stream)
            temporary.keep_as(destination)

    def verify(self, file: File) -> None:
        """Check a blob as `unpack` does, and keep nothing. Raises as `unpack` does."""
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123
            self.unpack(file, nothing)

    def remove_damaged(self, digest: str) -> None:
        """Remove a blob whose bytes are not its digest's, so that it is fetched again. Raises StoreError."""
        path = self.path(digest)
        with typed_errors("remove the damaged", path):
            path.unlink(missing_ok=True)


def _level(size: int) -> int:
    return SMALL_LEVEL if size <= SMALL else DEFAULT_LEVEL


def _compress(raw: HashingReader, packed: HashingWriter, size: int, level: int, path: Path) -> None:
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False, threads=0)
    try:
        compressor.copy_stream(raw, packed, size=size, read_size=CHUNK, write_size=CHUNK)  # type: ignore[arg-type]
    except zstandard.ZstdError as error:
        raise StoreError(
            f"{path} could not be compressed as a file of {size} bytes: {error}",
            hint="something else writes to it: store it when it is finished",
            path=str(path),
        ) from error


def missing_files(blobs: Blobs, artifact: Artifact) -> list[File]:
    """The files of a record whose blobs are missing or have another size. Raises CorruptError, StoreError."""
    return [file for file in each_file(artifact) if not blobs.has(file.blob, file.blob_size)]
