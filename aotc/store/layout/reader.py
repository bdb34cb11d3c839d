"""Reading a store: what a reference names, and its blobs. Nothing is written, and no lock is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from aotc.errors import CorruptError
from aotc.store.files.disk import read_limited, typed_errors
from aotc.store.layout import oci
from aotc.store.layout.blob_reader import BlobReader
from aotc.store.layout.names import is_digest
from aotc.store.layout.oci import Descriptor, ImageIndex
from aotc.store.reference import Reference

INDEX_LIMIT = 64 << 20


class StoreReader:
    """A folder that is an OCI image layout."""

    def __init__(self, path: Path, blobs: BlobReader | None = None) -> None:
        self.path = path
        self.blobs = blobs or BlobReader(path / "blobs")

    @classmethod
    def open(cls, path: Path | str, **options: Any) -> Self:
        """The store at `path`; writes nothing.

        Raises NotFoundError where there is no such folder, StoreError where it is not a layout, SchemaVersionError for
        a layout of another version, CorruptError for an `oci-layout` that cannot be read.
        """
        path = checked_path(path)
        try:
            data = read_limited(path / "oci-layout", oci.MANIFEST_LIMIT)
        except OSError as error:
            from aotc.store.layout.near_stores import no_layout

            no_layout(path, error)
        if data != oci.LAYOUT:
            from aotc.store.layout.oci import check_layout

            check_layout(data, str(path / "oci-layout"))
        return cls(path, **options)

    def resolve(self, reference: Reference) -> Descriptor:
        """The bundle that a reference names; its store part is not looked at.

        Raises NotFoundError, whose `known` lists the names there are, nearest first; CorruptError, StoreError.
        """
        if reference.digest is not None:
            from aotc.store.layout.tags import resolve_digest

            return resolve_digest(reference, reference.digest, self.blobs, self.read_index, str(self.path))
        return find_tag(self.read_index(), reference, str(self.path))

    def attachment(self, name: str) -> Descriptor | None:
        """The manifest that `index.json` calls `name`, like `sha256-<hex>.sig`; None where there is none.

        Raises CorruptError, also where two manifests have that name; StoreError.
        """
        from aotc.store.layout.index import find_attachment

        return find_attachment(self.read_index(), name, f"{self.path}/index.json")

    def read_index(self) -> ImageIndex:
        return self.decode(self.read_index_bytes())

    def read_index_bytes(self) -> bytes:
        path = self.path / "index.json"
        with typed_errors("read", path):
            try:
                return read_limited(path, INDEX_LIMIT)
            except FileNotFoundError:
                from aotc.store.layout.near_stores import no_index

                raise no_index(path) from None

    def decode(self, data: bytes) -> ImageIndex:
        """The `index.json` of these bytes. Raises CorruptError, SchemaVersionError."""
        try:
            return oci.decode(data, ImageIndex, str(self.path / "index.json"))
        except CorruptError as error:
            from aotc.store.layout.near_stores import MAKE_ANEW

            error.hint = error.hint or MAKE_ANEW
            raise


def checked_path(path: Path | str) -> Path:
    if not str(path).isprintable():
        from aotc.store.layout.near_stores import unprintable

        raise unprintable(path)
    return Path(path)


def find_tag(index: ImageIndex, reference: Reference, where: str) -> Descriptor:
    """The bundle that a reference with a tag names in the `index.json` of the store `where`.

    Raises NotFoundError, whose `known` lists the names there are, nearest first; CorruptError for two bundles.
    """
    name = reference.name
    named = (entry for entry in index.manifests if entry.annotation(oci.REF_NAME) == name)
    found = {entry.digest: entry.size for entry in named if entry.media_type == oci.INDEX and is_digest(entry.digest)}
    if len(found) != 1:
        from aotc.store.layout.tags import not_one_bundle

        raise not_one_bundle(index, reference, where, sorted(found))
    return Descriptor(oci.INDEX, *found.popitem())
