"""What bundles are read from: a folder, or a remote. Readers of both are the same code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from aotc.records import File
from aotc.store.layout import Store, TagEntry
from aotc.store.oci import Descriptor
from aotc.store.reference import Reference, is_remote

T = TypeVar("T")
R = TypeVar("R")


class BlobSource(Protocol):
    """Where checked bytes come from by their digest. `Blobs` is one; each method raises as its does."""

    def read(self, digest: str, limit: int) -> bytes: ...

    def load(self, file: File, limit: int) -> bytes: ...


class Readable(Protocol):
    """A `Store`, or a `RemoteStore`."""

    @property
    def blobs(self) -> BlobSource: ...

    def resolve(self, reference: Reference) -> Descriptor: ...

    def attachment(self, name: str) -> Descriptor | None:
        """The image manifest called `name`, like the signature `sha256-<hex>.sig`; None where there is none."""

    def tags(self) -> list[TagEntry]: ...

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`function` of each item, several at a time where the items are fetched."""


def open_readable(where: str) -> Readable:
    """The store in a folder or at a URL; nothing is connected to yet. Raises NotFoundError, StoreError, as `Store.open`
    does."""
    if not is_remote(where):
        return Store.open(Path(where))
    from aotc.store.remote_store import RemoteStore
    from aotc.store.transfer import Transfer

    return RemoteStore(Transfer(where))
