"""Immutable bytes under their own sha256."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, Protocol

import zstandard

from aotc.digest import CHUNK, sha256_bytes
from aotc.errors import CorruptError, NotFoundError, StoreError
from aotc.records import File, Record
from aotc.store.disk import draft, open_regular, read_limited, require_room, typed_errors, write_atomically
from aotc.store.names import check_file_name, hex_of

DEFAULT_LEVEL = 10
SMALL, SMALL_LEVEL = 1 << 20, 18  # bytes; for so few, a tenth less takes at most a quarter of a second
HASHED_ASIDE = 1 << 17  # bytes; hashing fewer takes less time than handing them to a thread
MAX_WINDOW = 1 << 27  # bytes of memory that a frame may ask of its reader: 128 MiB, zstd's own default limit


class Blob(Record, frozen=True):
    """What a blob is named by: the digest and the size of its bytes."""

    digest: str
    size: int


class Blobs:
    """The blobs of a store.

    folder/                    STORE/blobs
    └── sha256/
        ├── <64 hex>           bytes whose sha256 this is; written once, never changed
        └── .tmp-<16 hex>      being written, or left by a killed process: never read

    `sharing` gives the lock that keeps gc out for a moment.
    """

    def __init__(self, folder: Path, sharing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.folder = folder
        self._sharing = sharing

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

    def keep(self, digest: str, size: int) -> bool:
        """Whether the blob is there; if so, gc spares it from now on as if it had just been written.

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
        """Let gc see a small blob, of at most `limit` bytes, as written now, if it is there. Raises StoreError."""
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
        name = path.name if name is None else name
        check_file_name(name)
        with typed_errors("read", path), open_regular(path) as source, draft(self.folder / "sha256") as temporary:
            with _Hash() as raw_hash, _Hash() as packed_hash:
                raw, packed = _HashingReader(source, path, raw_hash), _HashingWriter(temporary.stream, packed_hash)
                size = os.fstat(source.fileno()).st_size
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
            with _Hash() as hashed:
                shutil.copyfileobj(_HashingReader(source, path, hashed), temporary.stream, CHUNK)
            _expect("digest", blob.digest, hashed.digest, path)
            temporary.keep_as(self.path(blob.digest))
        return True

    def read(self, digest: str, limit: int) -> bytes:
        """The bytes of a blob of at most `limit` bytes, checked.

        Raises NotFoundError, CorruptError (size or digest), StoreError.
        """
        with _about(digest):
            with self._missing_or_typed(digest):
                data = read_limited(self.path(digest), limit)
            _expect("digest", digest, sha256_bytes(data), self.path(digest))
        return data

    def load(self, file: File, limit: int) -> bytes:
        """A small file's decompressed bytes, checked like `extract` does. Raises CorruptError above `limit` bytes."""
        if file.size > limit:
            raise _corrupt("size of the decompressed file", f"at most {limit} bytes", f"{file.size}", Path(file.name))
        sink = io.BytesIO()
        self.unpack(file, sink)
        return sink.getvalue()

    def extract(self, file: File, destination: Path) -> None:
        """Decompress a blob to the read-only file `destination`, which appears whole and checked, or not at all.

        Raises NotFoundError, CorruptError where the blob's digest or size or the decompressed bytes' digest or size
        are not the record's (no more than `file.size` bytes are ever written), StoreError.
        """
        with draft(destination.parent, mode=0o444) as temporary:
            require_room(temporary.stream, destination, file.size)
            self.unpack(file, temporary.stream)
            temporary.keep_as(destination)

    def verify(self, file: File) -> None:
        """Check a blob as `extract` does, and keep nothing. Raises as `extract` does."""
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123
            self.unpack(file, nothing)

    def unpack(self, file: File, sink: BinaryIO) -> None:
        """Decompress a blob into an open file. Raises as `extract` does, when bytes may have been written."""
        hex_of(file.digest)
        with _about(file.blob):
            with self._missing_or_typed(file.blob):
                source = open_regular(self.path(file.blob))
            with source:
                self._unpack_stream(file, source, sink)

    def _unpack_stream(self, file: File, source: BinaryIO, sink: BinaryIO) -> None:
        path = self.path(file.blob)
        _expect("size", file.blob_size, os.fstat(source.fileno()).st_size, path)
        with _Hash() as packed_hash, _Hash() as raw_hash:
            packed, raw = _HashingReader(source, path, packed_hash), _HashingWriter(sink, raw_hash)
            flaw = _decompress(packed, raw, file.size)
            packed.drain(file.blob_size)
        # The blob's own digest first: where it is wrong, all that follows from it is only a consequence.
        _expect("digest", file.blob, packed.digest, path)
        if flaw:
            raise _corrupt("compressed form", f"one zstd frame of {file.size} bytes", flaw, path)
        _expect("size of the decompressed file", file.size, raw.size, path)
        _expect("digest of the decompressed file", file.digest, raw.digest, path)

    def remove_damaged(self, digest: str) -> None:
        """Remove a blob whose bytes are not its digest's, so that it is fetched again. Raises StoreError."""
        path = self.path(digest)
        with typed_errors("remove the damaged", path):
            path.unlink(missing_ok=True)

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
                    hint="the store was copied in part or cleaned by hand: build or fetch the bundle again",
                    known=(),
                    digest=digest,
                ) from error
            raise


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


@contextmanager
def _about(digest: str) -> Iterator[None]:
    """Let a CorruptError say which blob it is about, so that a caller with a remote can fetch that one again."""
    try:
        yield
    except CorruptError as error:
        error.with_fields(digest=digest)
        raise


class _Hash:
    """sha256 of what passes, computed in a thread of its own while the next piece is read, packed or written.

    hashlib and zstandard release the GIL. Small pieces are hashed at once: a thread costs more than they do.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self.size = 0

    def __enter__(self) -> _Hash:
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

    def __init__(self, hashed: _Hash) -> None:
        self._hash = hashed

    @property
    def size(self) -> int:
        return self._hash.size

    @property
    def digest(self) -> str:
        return self._hash.digest


class _HashingReader(_Hashing):
    """Reads a stream, hashing what passes; an error of the stream names `path`, not what is being written."""

    def __init__(self, stream: _Readable, path: Path, hashed: _Hash) -> None:
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


class _HashingWriter(_Hashing):
    """Writes to a stream, hashing what passes."""

    def __init__(self, stream: BinaryIO, hashed: _Hash) -> None:
        super().__init__(hashed)
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._stream.write(data)
        return len(data)


def _level(size: int) -> int:
    return SMALL_LEVEL if size <= SMALL else DEFAULT_LEVEL


def _compress(raw: _HashingReader, packed: _HashingWriter, size: int, level: int, path: Path) -> None:
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False, threads=0)
    try:
        compressor.copy_stream(raw, packed, size=size, read_size=CHUNK, write_size=CHUNK)  # type: ignore[arg-type]
    except zstandard.ZstdError as error:
        raise StoreError(
            f"{path} could not be compressed as a file of {size} bytes: {error}",
            hint="something else writes to it: store it when it is finished",
            path=str(path),
        ) from error


def _decompress(packed: _HashingReader, raw: _HashingWriter, size: int) -> str:
    """Write at most `size` bytes to `raw`; what is wrong with the frame, or ""."""
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


def _expect(what: str, expected: str | int, actual: str | int, path: Path) -> None:
    if expected != actual:
        raise _corrupt(what, str(expected), str(actual), path)


def _corrupt(what: str, expected: str, actual: str, path: Path) -> CorruptError:
    return CorruptError(
        f"{path} is corrupt: its {what} should be {expected} and is {actual}",
        hint="remove that blob, then build or fetch the bundle again",
        path=str(path),
        expected=expected,
        actual=actual,
        flaw=what,
    )
