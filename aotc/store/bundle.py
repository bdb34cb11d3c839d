"""Bundles and artifacts: between aotc's records and the JSON of OCI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aotc.digest import canonical_json
from aotc.errors import CorruptError, Issue, NotFoundError, SchemaVersionError, StoreError
from aotc.records import Artifact, File, Record, Variant, bucket_name, decode_artifact
from aotc.store import oci
from aotc.store.blobs import Blob, Blobs
from aotc.store.layout import Store, TagEntry
from aotc.store.names import check_file_name, folded, hex_of, name_flaw
from aotc.store.oci import Descriptor, Index, Manifest
from aotc.store.readable import Readable
from aotc.store.reference import Reference

ARTIFACT_TYPE = "application/vnd.aotc.artifact.v1"
CONFIG = "application/vnd.aotc.artifact.config.v1+json"
FILE = "application/vnd.aotc.file.v1+zstd"

CONFIG_LIMIT = 16 << 20  # bytes; JSON takes up to 25 times as much memory when it is read

_MOST_FROM_ONE_BYTE = 1 << 15  # bytes
_FRAME = 1 << 16  # bytes that a frame may take beside its content

_OURS = (oci.MODEL, oci.TARGET, oci.CREATED, oci.REF_NAME)


class BundleEntry(Record, frozen=True):
    """One artifact of a bundle: its manifest's digest and size, its target and the bundle's model."""

    digest: str
    size: int
    target: str
    model: str


class Bundle(Record, frozen=True):
    """All artifacts of one model version. `annotations` are those that `publish` was given."""

    model: str
    digest: str
    created: str
    annotations: dict[str, str]
    artifacts: tuple[BundleEntry, ...]


def publish(
    store: Store,
    model: str,
    tag: str,
    artifacts: Sequence[Artifact],
    *,
    created: str,
    annotations: Mapping[str, str] | None = None,
) -> str:
    """Write the artifacts' manifests, the bundle, and then let `model:tag` name it. Returns the bundle's digest.

    The files' blobs must be in the store. An artifact's bytes depend on its record alone; `created` (RFC 3339) and
    `annotations` go into the bundle. Killed before the tag, it leaves blobs that nothing names, and the old tag.

    Raises NotFoundError for missing blobs (all of them in `issues`), StoreError for what cannot be published,
    CorruptError for a record with unsafe names or bad digests, ReferenceFormatError.
    """
    Reference(None, model, tag=tag)  # a bad name fails before anything is written
    annotations = dict(annotations or {})
    _check_publishable(model, artifacts, annotations)
    with store.sharing():  # what was seen to be there stays there until the tag names it
        _check_blobs(store.blobs, artifacts)
        index = Index(
            schema_version=oci.OCI_SCHEMA_VERSION,
            media_type=oci.INDEX,
            manifests=tuple(_put_artifact(store.blobs, artifact) for artifact in artifacts),
            annotations={**annotations, oci.MODEL: model, oci.CREATED: created},
        )
        blob = _put_manifest(store.blobs, index)
        tagged = {oci.MODEL: model, oci.CREATED: created}
        store.set_tag(model, tag, _descriptor(oci.INDEX, blob, tagged))
    return blob.digest


def read_bundle(store: Readable, reference: Reference) -> Bundle:
    """The bundle that a reference names, its bytes checked against the digest.

    Raises NotFoundError, CorruptError (also where it is no bundle, or one of another model), SchemaVersionError,
    StoreError.
    """
    return _bundle_at(store, store.resolve(reference), reference)


def read_tagged(store: Readable, entry: TagEntry) -> Bundle:
    """The bundle of a tag that `store.tags()` gave: the index is not read again. Raises as `read_bundle` does."""
    descriptor = Descriptor(media_type=oci.INDEX, digest=entry.digest, size=entry.size)
    return _bundle_at(store, descriptor, Reference(None, entry.model, tag=entry.tag))


def _bundle_at(store: Readable, descriptor: Descriptor, reference: Reference) -> Bundle:
    data = store.blobs.read(descriptor.digest, oci.MANIFEST_LIMIT)
    _check_size(descriptor, data)
    index = oci.decode_index(data, descriptor.digest)
    model = index.annotation(oci.MODEL)
    if not model or (model != reference.model and not reference.in_registry):
        raise CorruptError(
            f"{reference.name} names {descriptor.digest}, which is "
            + (f"a bundle of the model {model!r}" if model else "no bundle of aotc's"),
            hint="somebody copied or tagged it under that name; load it under its own",
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
        annotations={key: value for key, value in (index.annotations or {}).items() if key not in _OURS},
        artifacts=entries,
    )


def read_artifact(store: Readable, artifact: BundleEntry | str) -> Artifact:
    """The record of an artifact of a bundle; or of the one whose manifest has that digest, whatever it is for.

    Checked: that it is for the model and target that the bundle says; both digests and sizes, both types, that every
    file's name is one path component, and that every blob which the record names is a layer of the manifest. The layers
    themselves are checked when they are extracted.

    Raises NotFoundError, CorruptError, SchemaVersionError, StoreError.
    """
    digest = artifact if isinstance(artifact, str) else artifact.digest
    manifest = oci.decode_manifest(store.blobs.read(digest, oci.MANIFEST_LIMIT), digest)
    _check_type("artifact type", manifest.artifact_type, ARTIFACT_TYPE, digest)
    _check_type("config type", manifest.config.media_type, CONFIG, digest)
    data = store.blobs.read(manifest.config.digest, CONFIG_LIMIT)
    _check_size(manifest.config, data)
    record = decode_artifact(data)
    if isinstance(artifact, BundleEntry) and (record.model, record.target) != (artifact.model, artifact.target):
        expected, actual = (f"`{one.model[:128]}` for {one.target[:128]}" for one in (artifact, record))
        raise CorruptError(
            f"the bundle calls {digest} an artifact of {expected}; its record says that it is one of {actual}",
            hint="it was not written by aotc, or was changed: build it again",
            expected=expected,
            actual=actual,
        )
    check_record(record)
    _check_layers(record, manifest, digest)
    return record


def check_record(artifact: Artifact) -> None:
    """Whether names and digests of a record are safe to make paths of. Raises CorruptError."""
    for file in each_file(artifact):
        check_file_name(file.name)
        hex_of(file.digest)
        hex_of(file.blob)
        _check_sizes(file)
    attributes = artifact.module.attributes_file
    if attributes is not None and attributes.size > CONFIG_LIMIT:
        raise CorruptError(
            f"the module's attributes have {attributes.size} bytes; at most {CONFIG_LIMIT} are read",
            expected=f"at most {CONFIG_LIMIT} bytes",
            actual=f"{attributes.size} bytes",
        )
    for variant in artifact.variants:
        _check_variant_names(variant)


def _check_sizes(file: File) -> None:
    """Whether a zstd frame of that size can give a file of that size: 4 bytes give 128 KiB at most, and what cannot be
    compressed takes hardly more than it is."""
    if file.size < 0 or file.blob_size < 0:
        raise CorruptError(
            f"the file {file.name} has a negative size", expected="≥ 0", actual=f"{file.size}, {file.blob_size}"
        )
    least, most = -(-file.size // _MOST_FROM_ONE_BYTE), file.size + file.size // 128 + _FRAME
    if not least <= file.blob_size <= most:
        raise CorruptError(
            f"the file {file.name} of {file.size} bytes cannot be what a blob of {file.blob_size} bytes holds",
            hint="the record was not written by aotc, or was changed: do not trust where it came from",
            expected=f"{least} to {most} bytes",
            actual=f"{file.blob_size} bytes",
        )


def each_file(artifact: Artifact) -> Iterator[File]:
    """Every file that the record names, in its order."""
    for variant in artifact.variants:
        yield from variant.files
        yield from (file for file in (variant.report, variant.picks, variant.read_values) if file is not None)
    if artifact.module.attributes_file is not None:
        yield artifact.module.attributes_file
    if artifact.constants is not None:
        yield artifact.constants


def missing_files(blobs: Blobs, artifact: Artifact) -> list[File]:
    """The files of a record whose blobs are not in the store, or have another size. Raises CorruptError, StoreError."""
    return [file for file in each_file(artifact) if not blobs.has(file.blob, file.blob_size)]


def _check_variant_names(variant: Variant) -> None:
    names = [file.name for file in variant.files]
    if len(set(map(folded, names))) < len(names):
        raise CorruptError(
            f"the variant {bucket_name(variant.bucket)} has two files of one name, or of names that some file systems "
            "take for one",
            expected="distinct names",
            actual=", ".join(sorted(names))[:500],
        )
    if variant.library not in names:
        raise CorruptError(
            f"the library {variant.library[:100]!r} of the variant {bucket_name(variant.bucket)} is none of its files",
            expected=", ".join(sorted(names))[:500],
            actual=variant.library[:100],
        )


def _check_publishable(model: str, artifacts: Sequence[Artifact], annotations: Mapping[str, str]) -> None:
    if not artifacts:
        raise StoreError(f"a bundle of {model!r} without artifacts is not published", hint="build at least one target")
    if reserved := sorted(set(annotations) & set(_OURS)):
        raise StoreError(f"the annotations {', '.join(reserved)} are aotc's own", hint="give yours other names")
    targets = [artifact.target for artifact in artifacts]
    if len(set(targets)) < len(targets):
        raise StoreError(
            f"a bundle of {model!r} has one artifact for each target; these were given: {', '.join(targets)}",
            hint="put all variants for one target into one artifact",
        )
    for artifact in artifacts:
        _check_artifact(model, artifact)


def _check_artifact(model: str, artifact: Artifact) -> None:
    if artifact.model != model:
        raise StoreError(
            f"an artifact of the model {artifact.model!r} is not published as {model!r}",
            hint="publish it under its own model's name",
        )
    if not artifact.variants:
        raise StoreError(
            f"the artifact of {model!r} for {artifact.target} has no variants, so nothing could be loaded from it",
            hint="build at least one bucket for that target",
        )
    check_record(artifact)


def _check_blobs(blobs: Blobs, artifacts: Sequence[Artifact]) -> None:
    issues = [
        Issue(
            message=f"the blob {file.blob} of {file.name} is missing or has another size",
            where=f"{artifact.model} for {artifact.target}",
            expected=f"{file.blob_size} bytes",
            actual="nothing" if (size := blobs.size(file.blob)) is None else f"{size} bytes",
        )
        for artifact in artifacts
        for file in missing_files(blobs, artifact)
    ]
    if issues:
        raise NotFoundError(
            f"{len(issues)} of the files to publish are not in the store",
            hint="build the units again; did something clean the store meanwhile?",
            issues=tuple(issues),
            known=(),
        )


def _put_artifact(blobs: Blobs, artifact: Artifact) -> Descriptor:
    record = artifact.encode()
    if len(record) > CONFIG_LIMIT:
        raise StoreError(
            f"the record of {artifact.model!r} has {len(record)} bytes; at most {CONFIG_LIMIT} are allowed",
            hint="split the model's buckets over several models",
        )
    config = blobs.put_bytes(record)
    manifest = Manifest(
        schema_version=oci.OCI_SCHEMA_VERSION,
        media_type=oci.MANIFEST,
        artifact_type=ARTIFACT_TYPE,
        config=_descriptor(CONFIG, config),
        layers=_layers(artifact),
    )
    named = {oci.MODEL: artifact.model, oci.TARGET: artifact.target}
    return _descriptor(oci.MANIFEST, _put_manifest(blobs, manifest), named)


def _put_manifest(blobs: Blobs, document: Manifest | Index) -> Blob:
    data = canonical_json(document)
    if len(data) > oci.MANIFEST_LIMIT:
        raise StoreError(
            f"a manifest of {len(data)} bytes is not published; registries take at most {oci.MANIFEST_LIMIT}",
            hint="split the model's buckets over several models",
        )
    return blobs.put_bytes(data)


def _layers(artifact: Artifact) -> tuple[Descriptor, ...]:
    """One layer for each distinct blob, in the record's order."""
    files: dict[str, File] = {}
    for file in each_file(artifact):
        files.setdefault(file.blob, file)
    return tuple(
        _descriptor(FILE, Blob(digest=file.blob, size=file.blob_size), {oci.TITLE: _title(file)})
        for file in files.values()
    )


def _title(file: File) -> str:
    # Tools that unpack an artifact name files so: unique, though variants call different files alike.
    return f"{hex_of(file.blob)[:16]}-{file.name}.zst"


def _descriptor(media_type: str, blob: Blob, annotations: dict[str, str] | None = None) -> Descriptor:
    return Descriptor(media_type=media_type, digest=blob.digest, size=blob.size, annotations=annotations)


def _bundle_entry(entry: Descriptor, model: str) -> BundleEntry:
    hex_of(entry.digest)
    target = entry.annotation(oci.TARGET)
    if entry.media_type != oci.MANIFEST or not target:
        raise CorruptError(
            f"{entry.digest} in the bundle is no artifact: media type {entry.media_type!r}, target {target!r}",
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


def _check_size(descriptor: Descriptor, data: bytes) -> None:
    if len(data) != descriptor.size:
        raise CorruptError(
            f"{descriptor.digest} has {len(data)} bytes; its descriptor says {descriptor.size}",
            expected=str(descriptor.size),
            actual=str(len(data)),
        )


def _check_type(what: str, found: str, supported: str, digest: str) -> None:
    if found == supported:
        return
    message = f"the {what} of {digest} is {found!r}; this aotc reads {supported!r}"
    if found.startswith("application/vnd.aotc."):
        raise SchemaVersionError(
            message, hint="load it with the aotc that built it, or rebuild it", found=found, supported=supported
        )
    raise CorruptError(message, hint="it is no artifact of aotc's", expected=supported, actual=found)


def _check_layers(artifact: Artifact, manifest: Manifest, digest: str) -> None:
    layers = {(layer.digest, layer.size) for layer in manifest.layers if layer.media_type == FILE}
    for file in each_file(artifact):
        if (file.blob, file.blob_size) not in layers:
            raise CorruptError(
                f"the file {file.name} has the blob {file.blob} of {file.blob_size} bytes, "
                f"which is no layer of the manifest {digest}",
                hint="a copy of this bundle would lose that file; build it again",
                expected=f"{file.blob} of {file.blob_size} bytes",
                actual=f"{len(layers)} other layers",
            )
