"""Transfers of blobs and documents between a remote and this host: parallel, resumed, checked."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec

from aotc.digest import CHUNK, sha256_bytes, sha256_file
from aotc.errors import CorruptError, RemoteError
from aotc.machine.locks import lock
from aotc.store.files.disk import open_regular, typed_errors
from aotc.store.files.writing import TEMPORARY_PREFIX, Draft, make_folder, require_room
from aotc.store.layout.blobs import Blob, Blobs
from aotc.store.remote.interface import Deadline, Limits, Remote, Retry, Traffic, retrying

T = TypeVar("T")
R = TypeVar("R")

_POLL = 0.05  # seconds between two tries to get a download that another process has


class TransferEvent(msgspec.Struct, frozen=True):
    """A blob of `size` bytes is to be moved ("planned"), or `size` more bytes of it have been ("moved").

    A negative `size` takes back what has to be moved again.
    """

    what: Literal["planned", "moved"]
    digest: str
    size: int


OnTransfer = Callable[[TransferEvent], None]


class Transfer:
    """One load, push or fetch: its remote, its time limit, its threads, and what it reports.

    The remote is opened when something is first asked of it. Threads share a transfer.
    """

    def __init__(
        self,
        url: str,
        open_remote: Callable[[str, Limits], Remote],
        limits: Limits | None = None,
        on_event: OnTransfer | None = None,
    ) -> None:
        self.url = url
        self.limits = limits or Limits.from_environment()
        self._deadline = Deadline(self.limits.total, url)
        self._on_event = on_event or (lambda event: None)
        self._opening = threading.Lock()
        self._open_remote = open_remote
        self._remote: Remote | None = None

    @property
    def remote(self) -> Remote:
        with self._opening:
            if self._remote is None:
                self._remote = self._open_remote(self.url, self.limits)
            return self._remote

    @property
    def traffic(self) -> Traffic:
        """What went over the network so far; nothing where the remote was never needed."""
        return self._remote.traffic if self._remote else Traffic()

    def retrying(self, attempt: Callable[[], T]) -> T:
        return retrying(self.limits, self._deadline, attempt)

    def read(self, media_type: str, digest: str, limit: int) -> bytes:
        """A small document, checked; what is not its digest's bytes is asked for once more.

        Raises RemoteError, NotFoundError, CorruptError.
        """
        actual = ""
        for _ in range(2):
            data = self.retrying(lambda: self.remote.read(media_type, digest, limit))
            actual = sha256_bytes(data)
            if actual == digest:
                return data
        raise self._damaged(digest, actual)

    def fetch(self, blob: Blob, blobs: Blobs, *, durable: bool) -> bool:
        """Download a blob into `blobs` unless it is there; whether it was downloaded.

        Until it is whole and checked it stands beside its place as `.tmp-<its 64 digits>`. A download that breaks is
        resumed at the byte where it broke, also by a later process; of several at once, one downloads. To gc it was
        written when it gets its name, however long ago its last byte came.
        Raises RemoteError, NotFoundError, CorruptError, StoreError.
        """
        path = blobs.path(blob.digest)
        if blobs.keep(blob.digest, blob.size):
            return False
        make_folder(path.parent)
        self._on_event(TransferEvent("planned", blob.digest, blob.size))
        partial = path.with_name(TEMPORARY_PREFIX + path.name)
        with typed_errors("write", partial), self._alone(partial) as stream:
            if blobs.keep(blob.digest, blob.size):  # another process was faster
                partial.unlink()
                self._on_event(TransferEvent("moved", blob.digest, blob.size))
                return False
            require_room(stream, path, blob.size - os.fstat(stream.fileno()).st_size)
            self._fill(blob, stream, partial)
            os.utime(stream.fileno())
            Draft(partial, stream).keep_as(path, durable=durable)
        return True

    def upload(self, blob: Blob, path: Path) -> bool:
        """Upload the blob in the file `path`, unless the remote has it; whether it was uploaded.

        Raises CorruptError where the file is not the blob, RemoteError, StoreError.
        """
        if self.retrying(lambda: self.remote.has_blob(blob.digest, blob.size)):
            return False
        with typed_errors("read", path):
            actual = sha256_file(path)
        if actual != blob.digest:
            raise CorruptError(
                f"{path} is corrupt, and not uploaded: its digest is {actual}",
                hint="build or fetch the bundle again",
                path=str(path),
                expected=blob.digest,
                actual=actual,
            )
        self._on_event(TransferEvent("planned", blob.digest, blob.size))
        self.retrying(lambda: self._put(blob, path))
        return True

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`function` of each item, `Limits.jobs` at a time. The first error ends the transfer, and is raised."""
        with ThreadPoolExecutor(self.limits.jobs, thread_name_prefix="aotc-transfer") as pool:
            try:
                working = [pool.submit(function, item) for item in items]
                for one in as_completed(working):
                    one.result()
            except BaseException:  # Ctrl-C too: the threads end at their next look at the clock
                self._deadline.cancel()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [one.result() for one in working]

    @contextlib.contextmanager
    def _alone(self, path: Path) -> Iterator[BinaryIO]:
        """The file at `path`, made if there is none, for this process and thread alone."""
        while True:
            with _open_to_append(path) as stream:
                while not lock(stream.fileno(), wait=False):
                    self._deadline.wait(_POLL)
                if _is_at(stream, path):
                    yield stream
                    return
            # It was finished or removed while we waited for it.

    def _fill(self, blob: Blob, stream: BinaryIO, path: Path) -> None:
        """Append the missing bytes of the blob to the file. A file that is then not the blob is discarded, once."""
        for _ in range(2):
            hashed = _hash_beginning(stream, blob.size)
            self._on_event(TransferEvent("moved", blob.digest, stream.tell()))
            retry = Retry(self.limits, self._deadline)
            while stream.tell() < blob.size:
                self._deadline.check()
                try:
                    with self._deadline.governing():
                        self._receive(blob, stream, path, hashed, retry)
                except RemoteError as error:
                    retry.after(error)
            actual = "sha256:" + hashed.hexdigest()
            if actual == blob.digest:
                return
            _empty(stream)
            self._on_event(TransferEvent("moved", blob.digest, -blob.size))
        raise self._damaged(blob.digest, actual)

    def _receive(self, blob: Blob, stream: BinaryIO, path: Path, hashed: hashlib._Hash, retry: Retry) -> None:
        """One attempt to get the rest of a blob. What came is in the file, however the attempt ends."""
        begin = stream.tell()
        with self.remote.open_blob(blob.digest, blob.size, begin) as chunks:
            for chunk in chunks:
                self._deadline.check()
                if stream.tell() + len(chunk) > blob.size:
                    raise self._damaged(blob.digest, f"more than {blob.size} bytes")
                with typed_errors("write", path):
                    stream.write(chunk)
                    stream.flush()
                hashed.update(chunk)
                retry.progressed()
                self._on_event(TransferEvent("moved", blob.digest, len(chunk)))
        if stream.tell() < blob.size:
            raise RemoteError(
                f"{self.url} sent {stream.tell()} of the {blob.size} bytes of {blob.digest}",
                url=self.url,
                transient=True,
            )

    def _put(self, blob: Blob, path: Path) -> None:
        with typed_errors("read", path), open_regular(path) as stream:
            reported = _Reported(stream, path, lambda size: self._report_sent(blob, size))
            try:
                self.remote.put_blob(blob.digest, blob.size, reported)  # type: ignore[arg-type]
            except RemoteError:
                self._on_event(TransferEvent("moved", blob.digest, -reported.tell()))
                raise

    def _report_sent(self, blob: Blob, size: int) -> None:
        self._deadline.check()
        self._on_event(TransferEvent("moved", blob.digest, size))

    def _damaged(self, digest: str, actual: str) -> CorruptError:
        return CorruptError(
            f"{self.url} sent {actual} for {digest}",
            hint="the remote, or a proxy before it, is broken, or its answers are changed on the way",
            expected=digest,
            actual=actual,
            path=self.url,
        )


class _Reported:
    """A file that says how much of it is read, and names itself in the errors of reading it."""

    def __init__(self, stream: BinaryIO, path: Path, on_read: Callable[[int], None]) -> None:
        self._stream = stream
        self._path = path
        self._on_read = on_read

    def read(self, size: int = -1) -> bytes:
        with typed_errors("read", self._path):
            data = self._stream.read(size)
        self._on_read(len(data))
        return data

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        before, after = self.tell(), self._stream.seek(offset, whence)
        self._on_read(after - before)
        return after


def _open_to_append(path: Path) -> BinaryIO:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptError(f"{path} is not a regular file", hint="remove it", path=str(path), expected="a regular file")
    return os.fdopen(descriptor, "r+b")


def _is_at(stream: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _empty(stream: BinaryIO) -> None:
    stream.seek(0)
    stream.truncate()


def _hash_beginning(stream: BinaryIO, limit: int) -> hashlib._Hash:
    """The hash of what an earlier download left, with the stream behind it; more than `limit` bytes are thrown away."""
    if os.fstat(stream.fileno()).st_size > limit:
        _empty(stream)
    hashed = hashlib.sha256()
    while chunk := stream.read(CHUNK):
        hashed.update(chunk)
    return hashed
