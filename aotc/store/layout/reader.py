"""Reading a store: tags, bundles, blobs. Nothing is written, and no lock is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self, TypeVar

from aotc.errors import CorruptError, StoreError
from aotc.records import Record
from aotc.store.files.disk import read_limited, typed_errors
from aotc.store.layout import oci
from aotc.store.layout.blob_reader import BlobReader
from aotc.store.layout.names import is_digest, name_flaw
from aotc.store.layout.oci import Descriptor, Index
from aotc.store.reference import Reference

T = TypeVar("T")
R = TypeVar("R")

INDEX_LIMIT = 64 << 20

_MAKE_ANEW = "restore index.json from a copy; or `aotc fsck --repair` makes it anew, with new tags for all bundles"


class TagEntry(Record, frozen=True):
    """A tag and the bundle that it names, with when the bundle says it was created, and when the tag was set."""

    model: str
    tag: str
    digest: str
    size: int
    created: str = ""
    published: str = ""

    def __str__(self) -> str:
        return f"{self.model}:{self.tag}"


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
        layout = path / "oci-layout"
        with typed_errors("open the store", path):
            if not path.exists():
                from aotc.store.layout.near_stores import no_store

                raise no_store(path)
            if not path.is_dir():
                raise StoreError(f"{path.absolute()} is a file; a store is a folder", hint="name the store's folder")
            if not layout.exists():
                raise StoreError(
                    f"{path.absolute()} is not a store: it has no file oci-layout",
                    hint="`aotc fsck --repair` writes oci-layout again"
                    if (path / "index.json").exists() and (path / "blobs").exists()
                    else "name the folder that holds oci-layout, index.json and blobs",
                    path=str(path),
                )
            oci.decode_layout(read_limited(layout, oci.MANIFEST_LIMIT), str(layout))
        return cls(path, **options)

    def tags(self) -> list[TagEntry]:
        """Every tag, sorted. Takes no lock. Raises CorruptError, StoreError."""
        return sorted(tag_entries(self.read_index()), key=lambda entry: (entry.model, entry.tag, entry.digest))

    def resolve(self, reference: Reference) -> Descriptor:
        """The bundle that a reference names; its store part is not looked at. Takes no lock.

        Raises NotFoundError, whose `known` lists the names there are, nearest first; CorruptError, StoreError.
        """
        if reference.digest is not None:
            return self._resolve_digest(reference, reference.digest)
        return find_tag(self.read_index(), reference, str(self.path))

    def entries(self) -> tuple[Descriptor, ...]:
        """Every entry of `index.json`, those of other tools too. Takes no lock. Raises CorruptError, StoreError."""
        return self.read_index().manifests

    def attachment(self, name: str) -> Descriptor | None:
        """The manifest that `index.json` calls `name`, like `sha256-<hex>.sig`; None where there is none.

        Takes no lock. Raises CorruptError, also where two manifests have that name; StoreError.
        """
        from aotc.store.layout.index import find_attachment

        return find_attachment(self.read_index(), name, f"{self.path}/index.json")

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`function` of each item, one after the other: nothing has to be waited for."""
        return [function(item) for item in items]

    def read_index_bytes(self) -> bytes:
        path = self.path / "index.json"
        with typed_errors("read", path):
            try:
                return read_limited(path, INDEX_LIMIT)
            except FileNotFoundError:
                raise CorruptError(
                    f"{self.path} has no index.json, so its tags are lost",
                    hint=_MAKE_ANEW,
                    path=str(path),
                    expected="a file",
                    actual="nothing",
                ) from None

    def read_index(self) -> Index:
        return self.decode(self.read_index_bytes())

    def decode(self, data: bytes) -> Index:
        """The `index.json` of these bytes. Raises CorruptError, SchemaVersionError."""
        try:
            return oci.decode_index(data, str(self.path / "index.json"))
        except CorruptError as error:
            error.hint = error.hint or _MAKE_ANEW
            raise

    def _resolve_digest(self, reference: Reference, digest: str) -> Descriptor:
        """A bundle needs no tag to be found by its digest: a moved tag leaves it where it is."""
        size = self.blobs.size(digest)
        if size is None or not self._is_bundle_of(reference.model, digest):
            known = [f"{entry.model}@{entry.digest}" for entry in tag_entries(self.read_index())]
            from aotc.store.layout.near_stores import not_found

            raise not_found(reference, known, str(self.path))
        return Descriptor(media_type=oci.INDEX, digest=digest, size=size)

    def _is_bundle_of(self, model: str, digest: str) -> bool:
        try:
            index = oci.decode_index(self.blobs.read(digest, oci.MANIFEST_LIMIT), digest)
        except CorruptError as error:
            if error.fields.get("actual", "").startswith("sha256:"):
                raise  # its bytes are not what its name says; otherwise it is a blob of another kind
            return False
        except StoreError as error:
            if "found" in error.fields:
                return False
            raise
        return index.annotation(oci.MODEL) == model


def checked_path(path: Path | str) -> Path:
    if not str(path).isprintable():
        raise StoreError(
            f"{str(path)[:200]!r} is not a path of a store: it holds an unprintable character",
            hint="choose a folder whose name can be printed",
        )
    return Path(path)


def find_tag(index: Index, reference: Reference, where: str) -> Descriptor:
    """The bundle that a reference with a tag names in the `index.json` of the store `where`.

    Raises NotFoundError, whose `known` lists the names there are, nearest first; CorruptError for two bundles.
    """
    entries = tag_entries(index)
    found = {entry.digest: entry for entry in entries if str(entry) == reference.name}
    if not found:
        from aotc.store.layout.near_stores import not_found

        raise not_found(reference, [str(entry) for entry in entries], where)
    if len(found) > 1:
        raise CorruptError(
            f"the tag {reference.name} names {len(found)} bundles in {where}: {', '.join(sorted(found))}",
            hint="build or tag it again, or load one of them by its digest",
            path=f"{where}/index.json",
            expected="one bundle",
            actual=f"{len(found)} bundles",
        )
    entry = next(iter(found.values()))
    return Descriptor(media_type=oci.INDEX, digest=entry.digest, size=entry.size)


def tag_entries(index: Index) -> list[TagEntry]:
    return [tag for entry in index.manifests if (tag := as_tag(entry)) is not None]


def as_tag(entry: Descriptor) -> TagEntry | None:
    """The tag that an entry of `index.json` is: an image index under a name `model:tag`; None for another's."""
    model, _, tag = entry.annotation(oci.REF_NAME).partition(":")
    if entry.media_type == oci.INDEX and is_digest(entry.digest) and not name_flaw(model) and not name_flaw(tag):
        created, published = entry.annotation(oci.CREATED), entry.annotation(oci.PUBLISHED)
        return TagEntry(model, tag, entry.digest, entry.size, created, published)
    return None
