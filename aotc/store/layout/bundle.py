"""Bundles and artifacts: between aotc's records and the JSON of OCI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aotc.records import Artifact, File, Record, decode_artifact
from aotc.store.layout import oci
from aotc.store.layout.names import check_file_name, name_flaw
from aotc.store.layout.oci import Descriptor, ImageIndex, ImageManifest
from aotc.store.reference import Reference

if TYPE_CHECKING:
    from aotc.store.readable import ReadableStore

ARTIFACT_TYPE = "application/vnd.aotc.artifact.v2"
CACHE_TYPE = "application/vnd.aotc.cache.v1"
"""Of a compiler cache: `aotc.store.layout.compiler_cache`."""
CONFIG = "application/vnd.aotc.artifact.config.v2+json"
FILE = "application/vnd.aotc.file.v1+zstd"
MAPPED_FILE = "application/vnd.aotc.file.v1"

CONFIG_LIMIT = 16 << 20  # bytes; JSON takes up to 25 times as much memory when it is read

OURS = (oci.MODEL, oci.TARGET, oci.CREATED, oci.REF_NAME)


class BundleEntry(Record, frozen=True):
    """One artifact of a bundle: its manifest's digest and size, its target and the bundle's model."""

    digest: str
    size: int
    target: str
    model: str

    @property
    def is_cache(self) -> bool:
        """Whether it is a compiler cache and no compiled model."""
        return self.target.startswith("cache:")


class Bundle(Record, frozen=True):
    """All artifacts of one model version. `annotations` are those that `publish` was given.

    `created` is RFC 3339, or "" for none: builds of equal inputs give equal bundles.
    """

    model: str
    digest: str
    created: str
    annotations: dict[str, str]
    artifacts: tuple[BundleEntry, ...]


def read_bundle(store: ReadableStore, reference: Reference, found: Descriptor | None = None) -> Bundle:
    """The bundle that a reference names, its bytes checked against the digest. `found`: its descriptor, if known.

    Raises NotFoundError, CorruptError (also where it is not a bundle, or one of another model), SchemaVersionError,
    StoreError.
    """
    found = found or store.resolve(reference)
    index = oci.decode(read_described(store, found, oci.MANIFEST_LIMIT), ImageIndex, found.digest)
    model = index.annotation(oci.MODEL)
    artifacts = tuple(BundleEntry(one.digest, one.size, one.annotation(oci.TARGET), model) for one in index.manifests)
    ours = (model == reference.model or reference.in_registry) and not name_flaw(model)
    distinct = len({entry.target for entry in artifacts}) == len(artifacts)
    if not (ours and distinct and all(entry.is_artifact(model) for entry in index.manifests)):
        from aotc.store.layout.bundle_errors import unsound_bundle

        raise unsound_bundle(reference, found.digest, index)
    annotations = {key: value for key, value in (index.annotations or {}).items() if key not in OURS}
    return Bundle(model, found.digest, index.annotation(oci.CREATED), annotations, artifacts)


def read_described(store: ReadableStore, descriptor: Descriptor, limit: int) -> bytes:
    """The bytes that a descriptor names, of its digest and size. Raises NotFoundError, CorruptError, StoreError."""
    data = store.blobs.read(descriptor.digest, limit)
    if len(data) != descriptor.size:
        from aotc.store.layout.bundle_errors import other_size

        raise other_size(descriptor, len(data))
    return data


def read_config(store: ReadableStore, digest: str, artifact_type: str, config_type: str) -> tuple[bytes, ImageManifest]:
    """The config of the manifest with that digest, and the manifest, of these types.

    Raises NotFoundError, CorruptError, SchemaVersionError, StoreError.
    """
    manifest = oci.read_document(store.blobs, digest, ImageManifest)
    if (manifest.artifact_type, manifest.config.media_type) != (artifact_type, config_type):
        from aotc.store.layout.bundle_errors import other_types

        raise other_types(manifest, artifact_type, config_type, digest)
    return read_described(store, manifest.config, CONFIG_LIMIT), manifest


def read_artifact(store: ReadableStore, artifact: BundleEntry | str) -> Artifact:
    """The record of an artifact of a bundle, or of the artifact whose manifest has that digest.

    Checked: both digests and sizes, both types, that it is for the model and target that the bundle says, and that
    every file's name is one path component. The rest was checked when it entered the store (`check_artifact`), and its
    files are when they are read.

    Raises NotFoundError, CorruptError, SchemaVersionError, StoreError.
    """
    if isinstance(artifact, str):
        digest, named = artifact, None
    else:
        digest, named = artifact.digest, (artifact.model, artifact.target)
        if artifact.is_cache:
            from aotc.store.layout.bundle_errors import is_a_cache

            raise is_a_cache()
    record = decode_artifact(read_config(store, digest, ARTIFACT_TYPE, CONFIG)[0])
    if named not in (None, said := (record.model, record.target)):
        from aotc.store.layout.bundle_errors import other_artifact

        raise other_artifact(digest, named, said)
    for file in each_file(record):
        check_file_name(file.name)
    return record


def each_file(artifact: Artifact) -> Iterator[File]:
    """Every file that the record names, in its order."""
    for kind in (artifact, *artifact.kinds):
        for variant in kind.variants:
            yield from variant.each_file()
        native = kind.native.file if kind.native else None
        yield from filter(None, (kind.module.attributes_file, kind.constants, kind.provenance, native))
