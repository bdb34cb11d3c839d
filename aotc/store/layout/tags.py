"""All tags of a store, and bundles that are named by their digest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.errors import CorruptError, StoreError
from aotc.records import Record
from aotc.store.layout import oci
from aotc.store.layout.blob_reader import BlobReader
from aotc.store.layout.names import is_digest, name_flaw
from aotc.store.layout.near_stores import not_found
from aotc.store.layout.oci import Descriptor, ImageIndex
from aotc.store.reference import Reference


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

    @property
    def reference(self) -> Reference:
        return Reference(None, self.model, tag=self.tag)

    @property
    def bundle(self) -> Descriptor:
        """The bundle, as the tag names it."""
        return Descriptor(oci.INDEX, self.digest, self.size)


def tag_entries(index: ImageIndex) -> list[TagEntry]:
    return [tag for entry in index.manifests if (tag := as_tag(entry)) is not None]


def as_tag(entry: Descriptor) -> TagEntry | None:
    """The tag that an entry of `index.json` is: an image index under a name `model:tag`; None for another's."""
    model, _, tag = entry.annotation(oci.REF_NAME).partition(":")
    if entry.media_type == oci.INDEX and is_digest(entry.digest) and not name_flaw(model) and not name_flaw(tag):
        created, published = entry.annotation(oci.CREATED), entry.annotation(oci.PUBLISHED)
        return TagEntry(model, tag, entry.digest, entry.size, created, published)
    return None


def not_one_bundle(index: ImageIndex, reference: Reference, where: str, digests: Sequence[str]) -> StoreError:
    """Of a tag that names the bundles of these digests, none or several, in the `index.json` of the store `where`."""
    if not digests:
        return not_found(reference, [str(entry) for entry in tag_entries(index)], where)
    return CorruptError(
        f"the tag {reference.name} names {len(digests)} bundles in {where}: {', '.join(digests)}",
        hint="build or tag it again, or load one of them by its digest",
        path=f"{where}/index.json",
        expected="one bundle",
        actual=f"{len(digests)} bundles",
    )


def resolve_digest(
    reference: Reference, digest: str, blobs: BlobReader, read_index: Callable[[], ImageIndex], where: str
) -> Descriptor:
    """Find a bundle by its digest; it needs no tag, so it is found after its tag has moved.

    Raises NotFoundError, CorruptError, StoreError.
    """
    size = blobs.size(digest)
    if size is None or not _is_bundle_of(reference.model, digest, blobs):
        known = [f"{entry.model}@{entry.digest}" for entry in tag_entries(read_index())]
        raise not_found(reference, known, where)
    return Descriptor(media_type=oci.INDEX, digest=digest, size=size)


def _is_bundle_of(model: str, digest: str, blobs: BlobReader) -> bool:
    try:
        index = oci.read_document(blobs, digest, ImageIndex)
    except CorruptError as error:
        if error.fields.get("actual", "").startswith("sha256:"):
            raise  # its bytes are not what its name says; otherwise it is a blob of another kind
        return False
    except StoreError as error:
        if "found" in error.fields:
            return False
        raise
    return index.annotation(oci.MODEL) == model
