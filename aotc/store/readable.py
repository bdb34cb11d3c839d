"""The interface to read bundles from a folder or a remote, so that readers of both are the same code."""

from __future__ import annotations

from typing import Protocol

from aotc.records import File
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.tags import TagEntry
from aotc.store.reference import Reference


class BlobSource(Protocol):
    """Where checked bytes come from by their digest. `Blobs` is one; each method raises as its does."""

    def read(self, digest: str, limit: int) -> bytes: ...

    def load(self, file: File, limit: int) -> bytes: ...


class ReadableStore(Protocol):
    """A `StoreReader`, or a `RemoteStore`."""

    @property
    def blobs(self) -> BlobSource: ...

    def resolve(self, reference: Reference) -> Descriptor: ...

    def attachment(self, name: str) -> Descriptor | None:
        """The image manifest called `name`, like the signature `sha256-<hex>.sig`; None where there is none."""


class Listable(ReadableStore, Protocol):
    """A `ReadableStore` that knows its tags."""

    def tags(self) -> list[TagEntry]: ...
