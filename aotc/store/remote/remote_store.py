"""A remote as a store that is read: its documents, and small files. Loads fetch first (`remote.fetching`)."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from aotc.errors import CorruptError
from aotc.records import File, decode
from aotc.store.layout import oci
from aotc.store.layout.blobs import Blobs
from aotc.store.layout.names import hex_of
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.tags import TagEntry
from aotc.store.reference import Reference
from aotc.store.remote.transfer import Transfer

_log = logging.getLogger("aotc")


class RemoteStore:
    """The bundles of a remote. Connects when something is first asked of it.

    Documents are taken from `local` where they are there: a bundle by its digest then costs no request.
    """

    def __init__(self, transfer: Transfer, local: Blobs | None = None) -> None:
        self.transfer = transfer
        self.blobs = RemoteBlobs(transfer, local)
        self._resolved: dict[Reference, Descriptor] = {}

    def resolve(self, reference: Reference) -> Descriptor:
        """The bundle that a reference names; the same one for as long as this object lives.

        Raises NotFoundError, CorruptError, RemoteError.
        """
        if reference not in self._resolved:
            self._resolved[reference] = self._resolve(reference)
            self.blobs.expect([self._resolved[reference]])
        return self._resolved[reference]

    def _resolve(self, reference: Reference) -> Descriptor:
        if reference.digest is not None and (size := self.blobs.local_size(reference.digest)) is not None:
            return Descriptor(media_type=oci.INDEX, digest=reference.digest, size=size)
        return self.transfer.retrying(lambda: self.transfer.remote.resolve(reference))

    def tags(self) -> list[TagEntry]:
        """Every tag, sorted. Raises StoreError for a registry, RemoteError, CorruptError."""
        return self.transfer.retrying(lambda: self.transfer.remote.tags())

    def attachment(self, name: str) -> Descriptor | None:
        """As `Store.attachment`. Raises RemoteError."""
        found = self.transfer.retrying(lambda: self.transfer.remote.attachment(name))
        self.blobs.expect([found] if found else [])
        return found


class RemoteBlobs:
    """The documents of a remote by their digest, as `Blobs` gives those of a store. Each is asked for once.

    A registry keeps documents apart from blobs, so what a digest names is learned from the documents above it.
    """

    def __init__(self, transfer: Transfer, local: Blobs | None) -> None:
        self._transfer = transfer
        self._local = local
        self._fetched: dict[str, bytes] = {}
        self._media_types: dict[str, str] = {}

    def expect(self, descriptors: Iterable[Descriptor]) -> None:
        """Learn what digests name."""
        self._media_types.update({one.digest: one.media_type for one in descriptors})

    def local_size(self, digest: str) -> int | None:
        """The size of a document that is in the local store, None where it is not."""
        return None if self._local is None else self._local.size(digest)

    def read(self, digest: str, limit: int) -> bytes:
        """A document of at most `limit` bytes, checked.

        Raises NotFoundError, CorruptError, RemoteError.
        """
        hex_of(digest)
        data = self._fetched.get(digest) or self._read_local(digest, limit)
        if data is None:
            data = self._transfer.read(self._media_types.get(digest, _BLOB), digest, limit)
            self._fetched[digest] = data
        if self._media_types.get(digest) in (oci.INDEX, oci.MANIFEST):
            with contextlib.suppress(CorruptError):  # the caller's to raise
                self.expect(decode(data, _Named).each())
        return data

    def _read_local(self, digest: str, limit: int) -> bytes | None:
        if self._local is None or self._local.size(digest) is None:
            return None
        try:
            return self._local.read(digest, limit)
        except CorruptError as error:
            _log.warning("%s; it is fetched again", error.message)
            self._local.remove_damaged(digest)
            return None

    def load(self, file: File, limit: int) -> bytes:
        """As `Blobs.load`; the blob is not kept. Raises RemoteError too."""
        data = self._transfer.read(_BLOB, file.blob, min(file.blob_size, limit + _FRAME))
        with tempfile.TemporaryDirectory(prefix="aotc-") as folder:
            blobs = Blobs(Path(folder))
            blobs.put_bytes(data)
            return blobs.load(file, limit)


class _Named(msgspec.Struct):
    """Whatever an index or a manifest names."""

    manifests: tuple[Descriptor, ...] = ()
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()

    def each(self) -> list[Descriptor]:
        return [*self.manifests, *([self.config] if self.config else []), *self.layers]


_BLOB = "application/octet-stream"
_FRAME = 1 << 16  # bytes that a zstd frame of incompressible bytes may be larger than they are, and more
