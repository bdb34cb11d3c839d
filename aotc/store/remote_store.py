"""A remote as `load` reads it: only what this host has not got, and each thing once per host."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from aotc.errors import CorruptError, NotFoundError, StoreError
from aotc.records import File, decode
from aotc.store import oci
from aotc.store.blobs import Blob, Blobs
from aotc.store.disk import draft
from aotc.store.hot import default_hot_folder
from aotc.store.layout import TagEntry
from aotc.store.locks import locked
from aotc.store.names import hex_of
from aotc.store.oci import Descriptor
from aotc.store.reference import Reference
from aotc.store.remote import Limits
from aotc.store.transfer import OnEvent, Transfer

VERSION = "remote-v1"

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger("aotc")


class RemoteStore:
    """The bundles of a remote, read through a cache on this host.

    `cache` is the folder of the hot copies; by default the one that `HotCopies` takes. A tag costs one request at each
    start, a digest none once everything is here. What is read stands under:

    folder/                         AOTC_CACHE_DIR
    ├── remote-v1/
    │   ├── sha256/<64 hex>         bundles, manifests, records; checked whenever they are read
    │   └── locks/<64 hex>.lock     held while that one is fetched
    └── hot-v1/downloads/sha256/    blobs on their way to become hot copies, `.tmp-<64 hex>` until they are whole
    """

    def __init__(self, transfer: Transfer, blobs: RemoteBlobs) -> None:
        self.transfer = transfer
        self.blobs = blobs

    @classmethod
    def cached(
        cls, url: str, cache: Path | None = None, limits: Limits | None = None, on_event: OnEvent | None = None
    ) -> RemoteStore:
        """The remote at a URL, read through the cache; connects to nothing yet. Raises StoreError for bad limits."""
        transfer = Transfer(url, limits, on_event)
        return cls(transfer, RemoteBlobs(transfer, _documents_folder(cache)))

    def resolve(self, reference: Reference) -> Descriptor:
        """The bundle that a reference names. Raises NotFoundError, CorruptError, RemoteError."""
        if reference.digest is not None and (size := self.blobs.cached_size(reference.digest)) is not None:
            found = Descriptor(media_type=oci.INDEX, digest=reference.digest, size=size)
        else:
            found = self.transfer.retrying(lambda: self.transfer.remote.resolve(reference))
        self.blobs.expect([found])
        return found

    def tags(self) -> list[TagEntry]:
        """Every tag, sorted. Raises StoreError for a registry, RemoteError, CorruptError."""
        return self.transfer.retrying(lambda: self.transfer.remote.tags())

    def attachment(self, name: str) -> Descriptor | None:
        """As `Store.attachment`. Raises RemoteError."""
        found = self.transfer.retrying(lambda: self.transfer.remote.attachment(name))
        self.blobs.expect([found] if found else [])
        return found

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """As `Transfer.each`."""
        return self.transfer.each(function, items)


class RemoteBlobs:
    """The blobs and documents of a remote by their digest, as `Blobs` gives those of a store.

    A registry keeps documents apart from blobs, so what a digest names is learned from the documents above it.
    """

    def __init__(self, transfer: Transfer, folder: Path | None) -> None:
        self._transfer = transfer
        self._folder = folder
        self._media_types: dict[str, str] = {}

    def expect(self, descriptors: Iterable[Descriptor]) -> None:
        """Learn what digests name."""
        self._media_types.update({one.digest: one.media_type for one in descriptors})

    def cached_size(self, digest: str) -> int | None:
        """The size of a document that is here and whole, None where it is not."""
        data = self._cached(digest, oci.MANIFEST_LIMIT)
        return None if data is None else len(data)

    def read(self, digest: str, limit: int) -> bytes:
        """A document of at most `limit` bytes, from here or from the remote, checked; then it is here.

        Raises NotFoundError, CorruptError, RemoteError.
        """
        hex_of(digest)
        data = self._cached(digest, limit)
        if data is None:
            data = self._fetched(digest, limit)
        if self._media_types.get(digest) in (oci.INDEX, oci.MANIFEST):
            with contextlib.suppress(CorruptError):  # the caller's to raise
                self.expect(decode(data, _Named).each())
        return data

    def load(self, file: File, limit: int) -> bytes:
        """As `Blobs.load`; the blob is not kept. Raises RemoteError too."""
        data = self._transfer.read(_BLOB, file.blob, min(file.blob_size, limit + _FRAME))
        with tempfile.TemporaryDirectory(prefix="aotc-") as folder:
            blobs = Blobs(Path(folder))
            blobs.put_bytes(data)
            return blobs.load(file, limit)

    def extract(self, file: File, destination: Path) -> None:
        """As `Blobs.extract`, for a `destination` in the folder of hot copies. Raises RemoteError too."""
        downloads, blob = Blobs(destination.parents[2] / "downloads"), Blob(digest=file.blob, size=file.blob_size)
        for again in (False, True):
            fetched = self._transfer.fetch(blob, downloads, durable=False)
            try:
                downloads.extract(file, destination)
                break
            except CorruptError:
                if fetched or again:
                    raise  # else a killed process left it, and it is damaged
            finally:
                with contextlib.suppress(OSError):
                    downloads.path(file.blob).unlink()

    def _cached(self, digest: str, limit: int) -> bytes | None:
        if self._folder is None:
            return None
        try:
            data = Blobs(self._folder).read(digest, limit)
            with contextlib.suppress(OSError):  # as a read-only one
                os.utime(Blobs(self._folder).path(digest))  # `aotc gc --cache` goes by it
            return data
        except NotFoundError:
            return None
        except CorruptError as error:
            _log.warning("a document of %s is fetched again: %s", self._transfer.url, error.message)
            return None
        except StoreError as error:
            self._do_without(error)
            return None

    def _fetched(self, digest: str, limit: int) -> bytes:
        with contextlib.ExitStack() as stack:
            if self._folder is not None:
                try:
                    lock = self._folder / "locks" / f"{hex_of(digest)}.lock"
                    stack.enter_context(locked(lock, self._transfer.limits.total))
                except StoreError as error:
                    self._do_without(error)
            data = self._cached(digest, limit)  # another process was faster
            if data is None:
                data = self._transfer.read(self._media_types.get(digest, _BLOB), digest, limit)
                self._keep(digest, data)
            return data

    def _keep(self, digest: str, data: bytes) -> None:
        if self._folder is None:
            return
        path = Blobs(self._folder).path(digest)
        try:
            with draft(path.parent) as temporary:
                temporary.stream.write(data)
                temporary.keep_as(path, durable=False)
        except StoreError as error:
            self._do_without(error)

    def _do_without(self, error: StoreError) -> None:
        """Go on without the cache where the system refuses it; what holds it for too long is an error."""
        if error.fields.get("errno") is None:
            raise error
        _log.warning("documents of %s are fetched at every start: %s", self._transfer.url, error.message)
        self._folder = None


class _Named(msgspec.Struct):
    """Whatever an index or a manifest names."""

    manifests: tuple[Descriptor, ...] = ()
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()

    def each(self) -> list[Descriptor]:
        return [*self.manifests, *([self.config] if self.config else []), *self.layers]


_BLOB = "application/octet-stream"
_FRAME = 1 << 16  # bytes that a zstd frame of incompressible bytes may be larger than they are, and more


def _documents_folder(cache: Path | None) -> Path | None:
    try:
        return (default_hot_folder() if cache is None else cache.absolute()) / VERSION
    except StoreError as error:
        _log.warning("documents of remotes are fetched at every start: %s", error.message)
        return None
