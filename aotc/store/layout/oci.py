"""The JSON of an OCI image layout, as far as aotc reads and writes it.

Unknown fields are allowed, as the OCI image specification asks of readers. Only OCI 1.0 fields go into an index:
older tools rewrite an index with others in it, and its digest changes. Annotations are not texts, as in `aotc.records`.
"""

from typing import Annotated, ClassVar, Protocol, TypeVar

import msgspec

from aotc.errors import CorruptError
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
        from aotc.store.layout.foreign import unreadable

        raise unreadable(where, error) from error
    if found.schema_version != OCI_SCHEMA_VERSION or found.media_type not in ("", document.TYPE):
        from aotc.store.layout.foreign import other_document

        raise other_document((found.schema_version, found.media_type), (OCI_SCHEMA_VERSION, document.TYPE), where)
    return found
