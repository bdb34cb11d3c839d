"""Bundles and artifacts: between aotc's records and the JSON of OCI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aotc.errors import CorruptError, SchemaVersionError, StoreError
from aotc.records import OTHER_VERSION, Artifact, File, Record, decode_artifact
from aotc.store.layout import oci
from aotc.store.layout.names import check_file_name, hex_of, name_flaw
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
    if (model != reference.model and not reference.in_registry) or name_flaw(model):
        raise _other_bundle(reference, found.digest, model)
    for entry in index.manifests:
        hex_of(entry.digest)
        if not entry.is_artifact(model):
            raise _bad_entry(entry, model)
    targets = sorted(entry.target for entry in artifacts)
    if len(different := {*targets}) < len(targets):
        raise CorruptError(
            f"{found.digest} has more than one artifact for a target: {', '.join(targets)[:500]}",
            hint="it was not written by aotc, or was changed: build it again",
            expected="one for each target",
            actual=f"{len(targets)} for {len(different)} targets",
        )
    annotations = {key: value for key, value in (index.annotations or {}).items() if key not in OURS}
    return Bundle(model, found.digest, index.annotation(oci.CREATED), annotations, artifacts)


def read_described(store: ReadableStore, descriptor: Descriptor, limit: int) -> bytes:
    """The bytes that a descriptor names, of its digest and size. Raises NotFoundError, CorruptError, StoreError."""
    data = store.blobs.read(descriptor.digest, limit)
    if len(data) != descriptor.size:
        raise CorruptError(
            f"{descriptor.digest} has {len(data)} bytes; its descriptor says {descriptor.size}",
            expected=str(descriptor.size),
            actual=str(len(data)),
        )
    return data


def read_config(store: ReadableStore, digest: str, artifact_type: str, config_type: str) -> tuple[bytes, ImageManifest]:
    """The config of the manifest with that digest, and the manifest, of these types.

    Raises NotFoundError, CorruptError, SchemaVersionError, StoreError.
    """
    manifest = oci.read_document(store.blobs, digest, ImageManifest)
    found = {"artifact type": (manifest.artifact_type, artifact_type)}
    found["config type"] = manifest.config.media_type, config_type
    for what, (said, supported) in found.items():
        if said != supported:
            message = f"the {what} of {digest} is {said!r}; this aotc reads {supported!r}"
            if said.startswith("application/vnd.aotc."):
                raise SchemaVersionError(message, hint=OTHER_VERSION, found=said, supported=supported)
            raise CorruptError(message, hint="it is not an aotc artifact", expected=supported, actual=said)
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
            raise is_a_cache()
    record = decode_artifact(read_config(store, digest, ARTIFACT_TYPE, CONFIG)[0])
    if named not in (None, said := (record.model, record.target)):
        raise _other_artifact(digest, named, said)
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


# -- errors ------------------------------------------------------------------------------------------------------------


def _other_bundle(reference: Reference, digest: str, model: str) -> CorruptError:
    """Of a blob that is not a bundle, or one of another `model` than the reference says, or of one with a bad name."""
    if model and (model == reference.model or reference.in_registry):
        return CorruptError(f"{digest} names its model {model[:100]!r}: {name_flaw(model)}", actual=model[:100])
    is_it = f"a bundle of the model {model!r}" if model else "not an aotc bundle"
    return CorruptError(
        f"{reference.name} names {digest}, which is {is_it}",
        hint="it was copied or tagged under that name; load it by its own",
        expected=reference.model or "a bundle",
        actual=model,
    )


def _bad_entry(entry: Descriptor, model: str) -> CorruptError:
    """Of an entry of the bundle of `model` that is not an artifact, or one of another model."""
    target, said = entry.annotation(oci.TARGET), entry.annotation(oci.MODEL)
    if entry.media_type != oci.MANIFEST or not target:
        return CorruptError(
            f"{entry.digest} in the bundle is not an artifact: media type {entry.media_type!r}, target {target!r}",
            expected=f"{oci.MANIFEST} with the annotation {oci.TARGET}",
            actual=entry.media_type,
        )
    return CorruptError(
        f"{entry.digest} in the bundle of {model!r} is for the model {said[:100]!r}",
        hint="it was not written by aotc, or was changed: build it again",
        expected=model,
        actual=said[:100],
    )


def _other_artifact(digest: str, named: tuple[str, str], said: tuple[str, str]) -> CorruptError:
    """Of an artifact whose bundle and whose record name another model and target."""
    expected, actual = (f"`{model[:128]}` for {target[:128]}" for model, target in (named, said))
    return CorruptError(
        f"the bundle calls {digest} an artifact of {expected}; its record says that it is one of {actual}",
        hint="it was not written by aotc, or was changed: build it again",
        expected=expected,
        actual=actual,
    )


def is_a_cache() -> StoreError:
    """Of a bundle that was to be a compiled model."""
    return StoreError(
        "the bundle is a compiler cache, and not a compiled model",
        hint="`aotc inspect REF` lists its files, `aotc cache restore REF` writes them",
    )
