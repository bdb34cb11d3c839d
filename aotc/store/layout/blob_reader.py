"""Reading blobs: each byte is checked against its digest before it is given, or while it is written."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import zstandard

from aotc.digest import CHUNK, sha256_bytes
from aotc.errors import CorruptError, NotFoundError
from aotc.records import File
from aotc.store.files.disk import open_regular, read_limited, store_error, typed_errors
from aotc.store.layout.names import hex_of

AT_ONCE = 1 << 20
"""Bytes; a file that is larger, packed or unpacked, is read in pieces."""
MAX_WINDOW = 1 << 27  # bytes of memory that a frame may ask of its reader: 128 MiB, zstd's own default limit


class BlobReader:
    """The blobs of a store in the folder STORE/blobs, `sha256/<64 hex>` each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """Where the blob stands or would stand. Raises CorruptError for a malformed digest."""
        return self.folder / "sha256" / hex_of(digest)

    def size(self, digest: str) -> int | None:
        """The blob's size on disk in bytes, None where there is no such blob. Raises StoreError."""
        path = self.path(digest)
        with typed_errors("look at", path):
            return path.stat().st_size if path.is_file() else None

    def has(self, digest: str, size: int) -> bool:
        """Whether a blob of that name and size is there; its bytes are not read. Raises StoreError."""
        return self.size(digest) == size

    def read(self, digest: str, limit: int) -> bytes:
        """The bytes of a blob of at most `limit` bytes, checked.

        Raises NotFoundError, CorruptError (size or digest), StoreError.
        """
        with _readable(path := self.path(digest)):
            data = read_limited(path, limit)
        expect("digest", digest, sha256_bytes(data), path)
        return data

    def load(self, file: File, limit: int) -> bytes:
        """A small file's decompressed bytes, checked as `unpack` does. Raises CorruptError above `limit` bytes."""
        if file.size > limit:
            expect("size of the decompressed file", f"at most {limit} bytes", file.size, self.path(file.blob))
        self.unpack(file, sink := io.BytesIO())
        return sink.getvalue()

    def unpack(self, file: File, sink: BinaryIO) -> None:
        """Decompress a blob into an open file, which may have bytes of it where this raises.

        Raises NotFoundError, CorruptError where the blob's digest or size or the decompressed bytes' digest or size
        are not the record's (no more than `file.size` bytes are ever written), StoreError.
        """
        hex_of(file.digest)
        with self._open(file) as source:
            (_copy if file.mapped else _unpack)(file, source, sink, self.path(file.blob))

    def open_mapped(self, file: File) -> BinaryIO:
        """The open blob of a file that is mapped in place, checked. Raises as `unpack` does."""
        source = self._open(file)
        try:
            with open(os.devnull, "wb") as nothing:  # noqa: PTH123
                _copy(file, source, nothing, self.path(file.blob))
        except BaseException:
            source.close()
            raise
        return source

    def _open(self, file: File) -> BinaryIO:
        with _readable(path := self.path(file.blob)):
            source = open_regular(path)
        if (size := os.fstat(source.fileno()).st_size) != file.blob_size:
            source.close()
        expect("size", file.blob_size, size, path)
        return source


def _copy(file: File, source: BinaryIO, sink: BinaryIO, path: Path) -> None:
    from aotc.store.layout.streams import copy

    expect("size of the file", file.size, file.blob_size, path)
    expect("digest", file.blob, copy(source, sink, file.size, path), path)


def _unpack(file: File, source: BinaryIO, sink: BinaryIO, path: Path) -> None:
    if at_once := max(file.blob_size, file.size) <= AT_ONCE:
        with typed_errors("read", path):
            data = source.read(file.blob_size + 1)
        flaw = _decompress(data, buffer := io.BytesIO(), file.size)
        blob, size, digest = sha256_bytes(data), buffer.tell(), sha256_bytes(buffer.getbuffer())
    else:
        from aotc.store.layout.streams import Hash, HashingReader, HashingWriter

        with Hash() as packed_hash, Hash() as raw_hash:
            packed, raw = HashingReader(source, path, packed_hash), HashingWriter(sink, raw_hash)
            flaw = _decompress(packed, raw, file.size)
            packed.drain(file.blob_size)
        blob, size, digest = packed.digest, raw.size, raw.digest
    # The blob's own digest first: where it is wrong, all that follows from it is only a consequence.
    expect("digest", file.blob, blob, path)
    if flaw:
        expect("compressed form", f"one zstd frame of {file.size} bytes", flaw, path)
    expect("size of the decompressed file", file.size, size, path)
    expect("digest of the decompressed file", file.digest, digest, path)
    if at_once:
        sink.write(buffer.getbuffer())


def _decompress(packed: Any, sink: Any, size: int) -> str:
    """Write at most `size` bytes to `sink`. Returns the fault of the frame, or ""."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    # Across frames: what follows the frame is then read, and refused unless it adds nothing.
    reader = decompressor.stream_reader(packed, read_size=CHUNK, read_across_frames=True, closefd=False)
    left = size
    try:
        while chunk := reader.read(min(CHUNK, left + 1)):
            if len(chunk) > left:
                return f"a frame of more than {size} bytes"
            sink.write(chunk)
            left -= len(chunk)
    except zstandard.ZstdError as error:
        return str(error)
    return ""


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Errors of the blob at `path` as typed ones. A CorruptError has its digest, so that a caller with a remote can
    fetch the blob again."""
    try:
        yield
    except OSError as error:
        _unreadable(path, error)
    except CorruptError as error:
        error.with_fields(digest=f"sha256:{path.name}")
        raise


def expect(what: str, expected: str | int, actual: str | int, path: Path) -> None:
    """Raises CorruptError where the blob at `path` is not as expected."""
    if expected != actual:
        raise _corrupt(what, str(expected), str(actual), path)


def _corrupt(what: str, expected: str, actual: str, path: Path) -> CorruptError:
    return CorruptError(
        f"{path} is corrupt: its {what} should be {expected} and is {actual}",
        hint="remove damaged blobs with `aotc fsck --repair`, then build or fetch the bundle again",
        path=str(path),
        expected=expected,
        actual=actual,
        flaw=what,
        digest=f"sha256:{path.name}",
    )


def _unreadable(path: Path, error: OSError) -> NoReturn:
    """Raises NotFoundError where there is no such blob, else StoreError."""
    typed = store_error("read", path, error)
    if not isinstance(error, FileNotFoundError):
        raise typed from error
    typed.__cause__ = error
    digest = f"sha256:{path.name}"
    raise NotFoundError(
        f"the blob {digest} is not in the store ({path})",
        hint="`aotc fsck --repair` removed it as damaged, or the store was copied in part: "
        "build or fetch the bundle again",
        known=(),
        digest=digest,
    ) from typed
