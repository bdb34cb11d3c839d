"""Bundles and artifacts: between aotc's records and the JSON of OCI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aotc.errors import CorruptError, SchemaVersionError, StoreError
from aotc.records import OTHER_VERSION, Artifact, File, Record, decode_artifact
from aotc.store.layout import oci
from aotc.store.layout.names import check_file_name, hex_of, name_flaw
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.reader import TagEntry
from aotc.store.reference import Reference

if TYPE_CHECKING:
    from aotc.store.layout.blobs import Blobs
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
    data = store.blobs.read(descriptor.digest, oci.MANIFEST_LIMIT)
    check_size(descriptor, data)
    index = oci.decode_index(data, descriptor.digest)
    model = index.annotation(oci.MODEL)
    if not model or (model != reference.model and not reference.in_registry):
        raise CorruptError(
            f"{reference.name} names {descriptor.digest}, which is "
            + (f"a bundle of the model {model!r}" if model else "not an aotc bundle"),
            hint="it was copied or tagged under that name; load it by its own",
            expected=reference.model or "a bundle",
            actual=model,
        )
    if flaw := name_flaw(model):
        raise CorruptError(f"{descriptor.digest} names its model {model[:100]!r}: {flaw}", actual=model[:100])
    entries = tuple(_bundle_entry(entry, model) for entry in index.manifests)
    targets = [entry.target for entry in entries]
    if len(set(targets)) < len(targets):
        raise CorruptError(
            f"{descriptor.digest} has more than one artifact for a target: {', '.join(sorted(targets))[:500]}",
            hint="it was not written by aotc, or was changed: build it again",
            expected="one for each target",
            actual=f"{len(targets)} for {len(set(targets))} targets",
        )
    return Bundle(
        model=model,
        digest=descriptor.digest,
        created=index.annotation(oci.CREATED),
        annotations={key: value for key, value in (index.annotations or {}).items() if key not in OURS},
        artifacts=entries,
    )


def read_artifact(store: Readable, artifact: BundleEntry | str) -> Artifact:
    """The record of an artifact of a bundle, or of the artifact whose manifest has that digest.

    Checked: both digests and sizes, both types, that it is for the model and target that the bundle says, and that
    every file's name is one path component. The rest was checked when it entered the store (`check_artifact`), and its
    files are when they are read.

    Raises NotFoundError, CorruptError, SchemaVersionError, StoreError.
    """
    if isinstance(artifact, BundleEntry) and artifact.is_cache:
        raise is_a_cache()
    digest = artifact if isinstance(artifact, str) else artifact.digest
    manifest = oci.decode_manifest(store.blobs.read(digest, oci.MANIFEST_LIMIT), digest)
    check_type("artifact type", manifest.artifact_type, ARTIFACT_TYPE, digest)
    check_type("config type", manifest.config.media_type, CONFIG, digest)
    data = store.blobs.read(manifest.config.digest, CONFIG_LIMIT)
    check_size(manifest.config, data)
    record = decode_artifact(data)
    if isinstance(artifact, BundleEntry) and (record.model, record.target) != (artifact.model, artifact.target):
        expected, actual = (f"`{one.model[:128]}` for {one.target[:128]}" for one in (artifact, record))
        raise CorruptError(
            f"the bundle calls {digest} an artifact of {expected}; its record says that it is one of {actual}",
            hint="it was not written by aotc, or was changed: build it again",
            expected=expected,
            actual=actual,
        )
    for file in each_file(record):
        check_file_name(file.name)
    return record


def is_a_cache() -> StoreError:
    """Of a bundle that was to be a compiled model."""
    return StoreError(
        "the bundle is a compiler cache, and not a compiled model",
        hint="`aotc inspect REF` lists its files, `aotc cache restore REF` writes them",
    )


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


def missing_files(blobs: Blobs, artifact: Artifact) -> list[File]:
    """The files of a record whose blobs are missing or have another size. Raises CorruptError, StoreError."""
    return [file for file in each_file(artifact) if not blobs.has(file.blob, file.blob_size)]


def _bundle_entry(entry: Descriptor, model: str) -> BundleEntry:
    hex_of(entry.digest)
    target = entry.annotation(oci.TARGET)
    if entry.media_type != oci.MANIFEST or not target:
        raise CorruptError(
            f"{entry.digest} in the bundle is not an artifact: media type {entry.media_type!r}, target {target!r}",
            expected=f"{oci.MANIFEST} with the annotation {oci.TARGET}",
            actual=entry.media_type,
        )
    if (said := entry.annotation(oci.MODEL)) not in ("", model):
        raise CorruptError(
            f"{entry.digest} in the bundle of {model!r} is for the model {said[:100]!r}",
            hint="it was not written by aotc, or was changed: build it again",
            expected=model,
            actual=said[:100],
        )
    return BundleEntry(digest=entry.digest, size=entry.size, target=target, model=model)


def check_size(descriptor: Descriptor, data: bytes) -> None:
    if len(data) != descriptor.size:
        raise CorruptError(
            f"{descriptor.digest} has {len(data)} bytes; its descriptor says {descriptor.size}",
            expected=str(descriptor.size),
            actual=str(len(data)),
        )


def check_type(what: str, found: str, supported: str, digest: str) -> None:
    if found == supported:
        return
    message = f"the {what} of {digest} is {found!r}; this aotc reads {supported!r}"
    if found.startswith("application/vnd.aotc."):
        raise SchemaVersionError(message, hint=OTHER_VERSION, found=found, supported=supported)
    raise CorruptError(message, hint="it is not an aotc artifact", expected=supported, actual=found)
