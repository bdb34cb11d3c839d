"""Reading blobs: each byte is checked against its digest before it is given, or while it is written."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import zstandard

from aotc.digest import CHUNK, sha256_bytes
from aotc.errors import CorruptError, NotFoundError, StoreError
from aotc.records import File, Record
from aotc.store.files.disk import open_regular, read_limited, typed_errors
from aotc.store.layout.names import hex_of

HASHED_ASIDE = 1 << 20  # bytes; hashing fewer takes less time than a thread, which several files at once do not need
MAX_WINDOW = 1 << 27  # bytes of memory that a frame may ask of its reader: 128 MiB, zstd's own default limit


class Blob(Record, frozen=True):
    """The name of a blob: the digest and the size of its bytes."""

    digest: str
    size: int


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
        with about_blob(digest):
            with self._missing_or_typed(digest):
                data = read_limited(self.path(digest), limit)
            expect("digest", digest, sha256_bytes(data), self.path(digest))
        return data

    def load(self, file: File, limit: int) -> bytes:
        """A small file's decompressed bytes, checked like `extract` does. Raises CorruptError above `limit` bytes."""
        if file.size > limit:
            raise _corrupt("size of the decompressed file", f"at most {limit} bytes", f"{file.size}", Path(file.name))
        sink = io.BytesIO()
        self.unpack(file, sink)
        return sink.getvalue()

    def verify(self, file: File) -> None:
        """Check a blob as `extract` does, and keep nothing. Raises as `extract` does."""
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123
            self.unpack(file, nothing)

    def unpack(self, file: File, sink: BinaryIO) -> None:
        """Decompress a blob into an open file. Raises as `extract` does, when bytes may have been written."""
        hex_of(file.digest)
        with about_blob(file.blob):
            with self._missing_or_typed(file.blob):
                source = open_regular(self.path(file.blob))
            with source:
                (self._copy_stream if file.mapped else self._unpack_stream)(file, source, sink)

    def open_mapped(self, file: File) -> BinaryIO:
        """The open blob of a file that is mapped where it lies, checked. Raises as `extract` does."""
        with about_blob(file.blob):
            with self._missing_or_typed(file.blob):
                source = open_regular(self.path(file.blob))
            try:
                with open(os.devnull, "wb") as nothing:  # noqa: PTH123
                    self._copy_stream(file, source, nothing)
            except BaseException:
                source.close()
                raise
        return source

    def _copy_stream(self, file: File, source: BinaryIO, sink: BinaryIO) -> None:
        path = self.path(file.blob)
        expect("size", file.blob_size, os.fstat(source.fileno()).st_size, path)
        expect("size of the file", file.size, file.blob_size, path)
        with Hash() as hashed:
            reader = HashingReader(source, path, hashed)
            while hashed.size < file.size and (chunk := reader.read(CHUNK)):
                sink.write(chunk)
        expect("digest", file.blob, hashed.digest, path)

    def _unpack_stream(self, file: File, source: BinaryIO, sink: BinaryIO) -> None:
        path = self.path(file.blob)
        expect("size", file.blob_size, os.fstat(source.fileno()).st_size, path)
        with Hash() as packed_hash, Hash() as raw_hash:
            packed, raw = HashingReader(source, path, packed_hash), HashingWriter(sink, raw_hash)
            flaw = _decompress(packed, raw, file.size)
            packed.drain(file.blob_size)
        # The blob's own digest first: where it is wrong, all that follows from it is only a consequence.
        expect("digest", file.blob, packed.digest, path)
        if flaw:
            raise _corrupt("compressed form", f"one zstd frame of {file.size} bytes", flaw, path)
        expect("size of the decompressed file", file.size, raw.size, path)
        expect("digest of the decompressed file", file.digest, raw.digest, path)

    @contextmanager
    def _missing_or_typed(self, digest: str) -> Iterator[None]:
        path = self.path(digest)
        try:
            with typed_errors("read", path):
                yield
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise NotFoundError(
                    f"the blob {digest} is not in the store ({path})",
                    hint="`aotc fsck --repair` removed it as damaged, or the store was copied in part: "
                    "build or fetch the bundle again",
                    known=(),
                    digest=digest,
                ) from error
            raise


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


@contextmanager
def about_blob(digest: str) -> Iterator[None]:
    """Add the blob's digest to a CorruptError, so that a caller with a remote can fetch that blob again."""
    try:
        yield
    except CorruptError as error:
        error.with_fields(digest=digest)
        raise


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

    def __init__(self, stream: _Readable, path: Path, hashed: Hash) -> None:
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


def _decompress(packed: HashingReader, raw: HashingWriter, size: int) -> str:
    """Write at most `size` bytes to `raw`. Returns the fault of the frame, or ""."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    # Across frames: what follows the frame is then read, and refused unless it adds nothing.
    reader = decompressor.stream_reader(packed, read_size=CHUNK, read_across_frames=True, closefd=False)  # type: ignore[arg-type]
    try:
        while chunk := reader.read(min(CHUNK, size - raw.size + 1)):
            if raw.size + len(chunk) > size:
                return f"a frame of more than {size} bytes"
            raw.write(chunk)
    except zstandard.ZstdError as error:
        return str(error)
    return ""


def expect(what: str, expected: str | int, actual: str | int, path: Path) -> None:
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
    )
