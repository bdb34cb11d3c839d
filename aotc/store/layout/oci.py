"""The JSON of an OCI image layout, as far as aotc reads and writes it.

Unknown fields are allowed, as the OCI image specification asks of readers. Only OCI 1.0 fields go into an index:
older tools rewrite an index with others in it, and its digest changes. Annotations are not texts, as in `aotc.records`.
"""

from typing import Annotated, TypeVar

import msgspec

from aotc.errors import CorruptError
from aotc.records import decode

OCI_SCHEMA_VERSION = 2
LAYOUT_VERSION = "1.0.0"
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


class _Document(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    pass


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


D = TypeVar("D", bound=msgspec.Struct)
T = TypeVar("T", Index, Manifest)


def created(at: str) -> dict[str, str]:
    """The annotation that says when a bundle was created; empty where `created` is ""."""
    return {CREATED: at} if at else {}


def decode_index(data: bytes, where: str) -> Index:
    """Raises CorruptError, SchemaVersionError."""
    return _checked(_decode(data, Index, where), INDEX, where)


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Raises CorruptError, SchemaVersionError."""
    return _checked(_decode(data, Manifest, where), MANIFEST, where)


def check_layout(data: bytes, where: str) -> None:
    """Raises CorruptError and SchemaVersionError for the bytes of an `oci-layout` that no aotc reads."""
    if data != LAYOUT:
        from aotc.store.layout.foreign import Layout, other_layout

        if (found := _decode(data, Layout, where).image_layout_version) != LAYOUT_VERSION:
            raise other_layout(found, LAYOUT_VERSION, where)


def _decode(data: bytes, document: type[D], where: str) -> D:
    try:
        return decode(data, document)
    except CorruptError as error:
        raise CorruptError(f"{where} cannot be read: {error.__cause__}", path=where) from error


def _checked(document: T, media_type: str, where: str) -> T:
    if document.schema_version != OCI_SCHEMA_VERSION or document.media_type not in ("", media_type):
        from aotc.store.layout.foreign import check_schema, other_type

        check_schema(document.schema_version, OCI_SCHEMA_VERSION, where)
        raise other_type(document.media_type, media_type, where)
    return document
