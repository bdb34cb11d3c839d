"""The JSON of an OCI image layout, as far as aotc reads and writes it.

Unknown fields are allowed, as the OCI image specification asks of readers. Only OCI 1.0 fields go into an index:
older tools rewrite an index with others in it, and its digest changes. Annotations are not texts, as in `aotc.records`.
"""

from typing import Annotated, ClassVar, Protocol, TypeVar

import msgspec

from aotc.errors import CorruptError, SchemaVersionError, StoreError
from aotc.records import decode as decode_record
from aotc.store.layout.names import is_digest

OCI_SCHEMA_VERSION = 2
LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
"""The bytes of `oci-layout` as aotc writes it; other tools may space them otherwise."""

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"

REF_NAME = "org.opencontainers.image.ref.name"
TITLE = "org.opencontainers.image.title"
CREATED = "org.opencontainers.image.created"
MODEL = "dev.aotc.model"
TARGET = "dev.aotc.target"
PUBLISHED = "dev.aotc.published"  # in index.json: when the tag was set
SPARSE = "dev.aotc.sparse"  # in index.json, "true": artifacts of the bundle may be absent from this store

# Registries refuse larger manifests; a reader needs a limit before it knows whom it reads from.
MANIFEST_LIMIT = 4 << 20


class _Document(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, rename="camel"):
    annotations: dict[str, str] | None = None

    def annotation(self, key: str) -> str:
        return (self.annotations or {}).get(key, "")


class Descriptor(_Document, frozen=True):
    """Names a blob: its media type, its digest, its size in bytes."""

    media_type: str
    digest: str
    size: Annotated[int, msgspec.Meta(ge=0)]

    def is_artifact(self, model: str) -> bool:
        """Whether an entry of a bundle can be an artifact of that model."""
        named = self.annotation(TARGET) != "" and self.annotation(MODEL) in ("", model)
        return named and self.media_type == MANIFEST and is_digest(self.digest)


class ImageManifest(_Document, frozen=True):
    """An image manifest: in aotc, an artifact, or the documents that are attached to the bundle `subject`."""

    TYPE: ClassVar[str] = MANIFEST
    schema_version: int
    config: Descriptor
    layers: tuple[Descriptor, ...]
    media_type: str = ""
    artifact_type: str = ""
    subject: Descriptor | None = None


class ImageIndex(_Document, frozen=True):
    """An image index: in aotc, a bundle; and the file `index.json`."""

    TYPE: ClassVar[str] = INDEX
    schema_version: int
    manifests: tuple[Descriptor, ...]
    media_type: str = ""


T = TypeVar("T", ImageIndex, ImageManifest)


class Documents(Protocol):
    """Where checked bytes come from by their digest, as the blobs of a store."""

    def read(self, digest: str, limit: int) -> bytes: ...


def read_document(documents: Documents, digest: str, document: type[T]) -> T:
    """The index or manifest with that digest. Raises as `documents.read` and `decode` do."""
    return decode(documents.read(digest, MANIFEST_LIMIT), document, digest)


def decode(data: bytes, document: type[T], where: str) -> T:
    """Raises CorruptError, SchemaVersionError."""
    try:
        found = decode_record(data, document)
    except CorruptError as error:
        raise unreadable(where, error) from error
    if found.schema_version != OCI_SCHEMA_VERSION or found.media_type not in ("", document.TYPE):
        raise other_document((found.schema_version, found.media_type), (OCI_SCHEMA_VERSION, document.TYPE), where)
    return found


# -- the file `oci-layout` ---------------------------------------------------------------------------------------------


LAYOUT_VERSION = "1.0.0"


class _Layout(msgspec.Struct, frozen=True, rename="camel"):
    """The file `oci-layout`."""

    image_layout_version: str


def check_layout(data: bytes, where: str) -> None:
    """Raises CorruptError and SchemaVersionError for the bytes of an `oci-layout` that no aotc reads."""
    try:
        found = decode_record(data, _Layout).image_layout_version
    except CorruptError as error:
        raise unreadable(where, error) from error
    if found != LAYOUT_VERSION:
        hint = "use a newer aotc, or copy the store with `skopeo copy` into a layout of that version"
        raise _other(f"{where} says image layout version", found, LAYOUT_VERSION, hint)


# -- documents that aotc cannot read -----------------------------------------------------------------------------------


def unreadable(where: str, error: CorruptError) -> CorruptError:
    return CorruptError(f"{where} cannot be read: {error.__cause__}", path=where)


def other_document(found: tuple[int, str], supported: tuple[int, str], where: str) -> StoreError:
    """Of an index or a manifest with an unknown `schemaVersion`, or else another media type."""
    if found[0] != supported[0]:
        return other_schema(found[0], supported[0], where)
    message = f"{where} has the media type {found[1]!r}, not {supported[1]!r}"
    return CorruptError(message, expected=supported[1], actual=found[1])


def other_schema(found: int, supported: int, where: str) -> SchemaVersionError:
    return _other(f"{where} has schemaVersion", found, supported, "it was not written by aotc, or by a newer one")


def _other(says: str, found: str | int, supported: str | int, hint: str) -> SchemaVersionError:
    message = f"{says} {found!r}; this aotc reads {supported!r}"
    return SchemaVersionError(message, hint=hint, found=found, supported=supported)
