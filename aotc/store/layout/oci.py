"""The JSON of an OCI image layout, as far as aotc reads and writes it.

Unknown fields are allowed, as the OCI image specification asks of readers. Only OCI 1.0 fields go into an index:
older tools rewrite an index with others in it, and its digest changes. Annotations are not texts, as in `aotc.records`.
"""

from typing import Annotated, TypeVar

import msgspec

from aotc.errors import CorruptError, SchemaVersionError
from aotc.records import decode

OCI_SCHEMA_VERSION = 2
LAYOUT_VERSION = "1.0.0"

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


class _Document(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    pass


D = TypeVar("D", bound=_Document)


class Descriptor(_Document, frozen=True):
    """Names a blob: its media type, its digest, its size in bytes."""

    media_type: str
    digest: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    annotations: dict[str, str] | None = None

    def annotation(self, key: str) -> str:
        return (self.annotations or {}).get(key, "")


class Manifest(_Document, frozen=True):
    """An image manifest: in aotc, an artifact, or the documents that are attached to the bundle `subject`."""

    schema_version: int
    config: Descriptor
    layers: tuple[Descriptor, ...]
    media_type: str = ""
    artifact_type: str = ""
    subject: Descriptor | None = None


class Index(_Document, frozen=True):
    """An image index: in aotc, a bundle; and the file `index.json`."""

    schema_version: int
    manifests: tuple[Descriptor, ...]
    media_type: str = ""
    annotations: dict[str, str] | None = None

    def annotation(self, key: str) -> str:
        return (self.annotations or {}).get(key, "")


class Layout(_Document, frozen=True):
    """The file `oci-layout`."""

    image_layout_version: str


def created(at: str) -> dict[str, str]:
    """The annotation that says when a bundle was created; empty where `created` is ""."""
    return {CREATED: at} if at else {}


def decode_index(data: bytes, where: str) -> Index:
    """Raises CorruptError, SchemaVersionError."""
    index = _decode(data, Index, where)
    check_schema(index.schema_version, where)
    if index.media_type not in ("", INDEX):
        raise CorruptError(
            f"{where} has the media type {index.media_type!r}, not {INDEX!r}", expected=INDEX, actual=index.media_type
        )
    return index


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Raises CorruptError, SchemaVersionError."""
    manifest = _decode(data, Manifest, where)
    check_schema(manifest.schema_version, where)
    if manifest.media_type not in ("", MANIFEST):
        raise CorruptError(
            f"{where} has the media type {manifest.media_type!r}, not {MANIFEST!r}",
            expected=MANIFEST,
            actual=manifest.media_type,
        )
    return manifest


def decode_layout(data: bytes, where: str) -> Layout:
    """Raises CorruptError, SchemaVersionError."""
    layout = _decode(data, Layout, where)
    if layout.image_layout_version != LAYOUT_VERSION:
        raise SchemaVersionError(
            f"{where} says image layout version {layout.image_layout_version!r}; this aotc reads {LAYOUT_VERSION!r}",
            hint="use a newer aotc, or copy the store with `skopeo copy` into a layout of that version",
            found=layout.image_layout_version,
            supported=LAYOUT_VERSION,
        )
    return layout


def _decode(data: bytes, document: type[D], where: str) -> D:
    try:
        return decode(data, document)
    except CorruptError as error:
        raise CorruptError(f"{where} cannot be read: {error.__cause__}", path=where) from error


def check_schema(found: int, where: str) -> None:
    """Raises SchemaVersionError for an unknown `schemaVersion` of an index or a manifest."""
    if found != OCI_SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{where} has schemaVersion {found}; this aotc reads {OCI_SCHEMA_VERSION}",
            hint="it was not written by aotc, or by a newer one",
            found=found,
            supported=OCI_SCHEMA_VERSION,
        )
