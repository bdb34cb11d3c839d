"""Bundles and artifacts: between aotc's records and the JSON of OCI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aotc.records import Artifact, File, Record, decode_artifact
from aotc.store.layout import oci
from aotc.store.layout.names import check_file_name, hex_of, name_flaw
from aotc.store.layout.oci import Descriptor, Manifest
from aotc.store.reference import Reference

if TYPE_CHECKING:
    from aotc.store.layout.tags import TagEntry
    from aotc.store.readable import Readable

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


def read_bundle(store: Readable, reference: Reference) -> Bundle:
    """The bundle that a reference names, its bytes checked against the digest.

    Raises NotFoundError, CorruptError (also where it is not a bundle, or one of another model), SchemaVersionError,
    StoreError.
    """
    return _bundle_at(store, store.resolve(reference), reference)


def read_tagged(store: Readable, entry: TagEntry) -> Bundle:
    """The bundle of a tag that `store.tags()` gave: the index is not read again. Raises as `read_bundle` does."""
    descriptor = Descriptor(media_type=oci.INDEX, digest=entry.digest, size=entry.size)
    return _bundle_at(store, descriptor, Reference(None, entry.model, tag=entry.tag))


def _bundle_at(store: Readable, descriptor: Descriptor, reference: Reference) -> Bundle:
    digest = descriptor.digest
    index = oci.decode_index(read_document(store, descriptor, oci.MANIFEST_LIMIT), digest)
    model = index.annotation(oci.MODEL)
    if (model != reference.model and not reference.in_registry) or name_flaw(model):
        from aotc.store.layout.bundle_errors import other_bundle

        raise other_bundle(reference, digest, model)
    entries = tuple(_bundle_entry(entry, model) for entry in index.manifests)
    targets = [entry.target for entry in entries]
    if len(set(targets)) < len(targets):
        from aotc.store.layout.bundle_errors import equal_targets

        raise equal_targets(digest, targets)
    annotations = {key: value for key, value in (index.annotations or {}).items() if key not in OURS}
    return Bundle(model, digest, index.annotation(oci.CREATED), annotations, entries)


def read_document(store: Readable, descriptor: Descriptor, limit: int) -> bytes:
    """The bytes that a descriptor names, of its digest and size. Raises NotFoundError, CorruptError, StoreError."""
    data = store.blobs.read(descriptor.digest, limit)
    if len(data) != descriptor.size:
        from aotc.store.layout.bundle_errors import other_size

        raise other_size(descriptor, len(data))
    return data


def read_config(store: Readable, digest: str, artifact_type: str, config_type: str) -> tuple[bytes, Manifest]:
    """The config of the manifest with that digest, and the manifest, of these types.

    Raises NotFoundError, CorruptError, SchemaVersionError, StoreError.
    """
    manifest = oci.decode_manifest(store.blobs.read(digest, oci.MANIFEST_LIMIT), digest)
    if (manifest.artifact_type, manifest.config.media_type) != (artifact_type, config_type):
        from aotc.store.layout.bundle_errors import other_types

        raise other_types(manifest, artifact_type, config_type, digest)
    return read_document(store, manifest.config, CONFIG_LIMIT), manifest


def read_artifact(store: Readable, artifact: BundleEntry | str) -> Artifact:
    """The record of an artifact of a bundle, or of the artifact whose manifest has that digest.

    Checked: both digests and sizes, both types, that it is for the model and target that the bundle says, and that
    every file's name is one path component. The rest was checked when it entered the store (`check_artifact`), and its
    files are when they are read.

    Raises NotFoundError, CorruptError, SchemaVersionError, StoreError.
    """
    entry = artifact if isinstance(artifact, BundleEntry) else None
    if entry and entry.is_cache:
        from aotc.store.layout.bundle_errors import is_a_cache

        raise is_a_cache()
    digest = artifact if isinstance(artifact, str) else artifact.digest
    record = decode_artifact(read_config(store, digest, ARTIFACT_TYPE, CONFIG)[0])
    if entry and (record.model, record.target) != (entry.model, entry.target):
        from aotc.store.layout.bundle_errors import other_artifact

        raise other_artifact(digest, (entry.model, entry.target), (record.model, record.target))
    for file in each_file(record):
        check_file_name(file.name)
    return record


def each_file(artifact: Artifact) -> Iterator[File]:
    """Every file that the record names, in its order."""
    for kind in (artifact, *artifact.kinds):
        for variant in kind.variants:
            yield from variant.each_file()
        for file in (
            kind.module.attributes_file,
            kind.constants,
            kind.provenance,
            *([kind.native.file] if kind.native else ()),
        ):
            if file is not None:
                yield file


def _bundle_entry(entry: Descriptor, model: str) -> BundleEntry:
    hex_of(entry.digest)
    target, said = entry.annotation(oci.TARGET), entry.annotation(oci.MODEL)
    if entry.media_type != oci.MANIFEST or not target or said not in ("", model):
        from aotc.store.layout.bundle_errors import bad_entry

        raise bad_entry(entry, model)
    return BundleEntry(digest=entry.digest, size=entry.size, target=target, model=model)
