"""Publishing: artifacts become a bundle that a tag names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from aotc.digest import canonical_json
from aotc.errors import Issue, NotFoundError, StoreError
from aotc.provenance import PROVENANCE, PROVENANCE_LIMIT, BuiltArtifact
from aotc.records import Artifact, File
from aotc.store.layout import oci
from aotc.store.layout.blobs import Blob, Blobs, describe, missing_files
from aotc.store.layout.bundle import ARTIFACT_TYPE, CONFIG, CONFIG_LIMIT, FILE, MAPPED_FILE, OURS, Bundle, each_file
from aotc.store.layout.check_record import check_record
from aotc.store.layout.index import created_annotation
from aotc.store.layout.names import hex_of
from aotc.store.layout.oci import Descriptor, ImageIndex, ImageManifest
from aotc.store.layout.store import Store
from aotc.store.reference import Reference


def publish(
    store: Store,
    model: str,
    tag: str,
    artifacts: Sequence[BuiltArtifact],
    *,
    created: str = "",
    annotations: Mapping[str, str] | None = None,
) -> str:
    """Write the artifacts' manifests, the bundle, and then let `model:tag` name it. Returns the bundle's digest.

    The files' blobs must be in the store. An artifact's bytes depend on its record alone; `annotations` and
    `created` (RFC 3339; "" for none) go into the bundle. Killed before the tag, it leaves blobs that nothing
    names, and the old tag.

    Raises NotFoundError for missing blobs (all of them in `issues`), StoreError for what cannot be published,
    CorruptError for a record with unsafe names or bad digests, ReferenceFormatError.
    """
    Reference(None, model, tag=tag)  # a bad name fails before anything is written
    annotations = dict(annotations or {})
    _check_publishable(model, artifacts, annotations)
    with store.sharing():  # what was seen to be there stays there until the tag names it
        _check_blobs(store.blobs, artifacts)
        index = ImageIndex(
            schema_version=oci.OCI_SCHEMA_VERSION,
            media_type=oci.INDEX,
            manifests=tuple(_put_artifact(store.blobs, artifact) for artifact in artifacts),
            annotations={**annotations, oci.MODEL: model, **created_annotation(created)},
        )
        blob = _put_manifest(store.blobs, index)
        tagged = {oci.MODEL: model, **created_annotation(created)}
        store.set_tag(model, tag, describe(oci.INDEX, blob, tagged))
    return blob.digest


def _check_publishable(model: str, artifacts: Sequence[BuiltArtifact], annotations: Mapping[str, str]) -> None:
    if not artifacts:
        raise StoreError(f"a bundle of {model!r} without artifacts is not published", hint="build at least one target")
    if reserved := sorted(set(annotations) & set(OURS)):
        raise StoreError(f"the annotations {', '.join(reserved)} are aotc's own", hint="give yours other names")
    targets = [artifact.target for artifact in artifacts]
    if len(set(targets)) < len(targets):
        raise StoreError(
            f"a bundle of {model!r} has one artifact for each target; these were given: {', '.join(targets)}",
            hint="put all variants for one target into one artifact",
        )
    for artifact in artifacts:
        _check_artifact(model, artifact)


def _check_artifact(model: str, artifact: BuiltArtifact) -> None:
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


def _check_blobs(blobs: Blobs, artifacts: Sequence[BuiltArtifact]) -> None:
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


def _put_artifact(blobs: Blobs, artifact: BuiltArtifact) -> Descriptor:
    record = _put_provenance(blobs, artifact)
    data = record.encode()
    _refuse_large("record", artifact, data, CONFIG_LIMIT)
    config = blobs.put_bytes(data)
    manifest = ImageManifest(
        schema_version=oci.OCI_SCHEMA_VERSION,
        media_type=oci.MANIFEST,
        artifact_type=ARTIFACT_TYPE,
        config=describe(CONFIG, config),
        layers=_layers((*each_file(record), *each_file(artifact))),
    )
    named = {oci.MODEL: artifact.model, oci.TARGET: artifact.target}
    return describe(oci.MANIFEST, _put_manifest(blobs, manifest), named)


def _put_provenance(blobs: Blobs, artifact: BuiltArtifact) -> Artifact:
    """Write the provenance of an artifact. Returns the record, which names its blob."""
    provenance = artifact.provenance_of().encode()
    _refuse_large("provenance", artifact, provenance, PROVENANCE_LIMIT)
    record = artifact.record(blobs.put_bytes_zstd(PROVENANCE, provenance))
    return msgspec.structs.replace(record, kinds=tuple(_put_provenance(blobs, kind) for kind in artifact.kinds))


def _refuse_large(what: str, artifact: BuiltArtifact, data: bytes, limit: int) -> None:
    if len(data) > limit:
        raise StoreError(
            f"the {what} of {artifact.model!r} has {len(data)} bytes; at most {limit} are allowed",
            hint="split the model's buckets over several models",
        )


def _put_manifest(blobs: Blobs, document: ImageManifest | ImageIndex) -> Blob:
    data = canonical_json(document)
    if len(data) > oci.MANIFEST_LIMIT:
        raise StoreError(
            f"a manifest of {len(data)} bytes is not published; registries take at most {oci.MANIFEST_LIMIT}",
            hint="split the model's buckets over several models",
        )
    return blobs.put_bytes(data)


def _layers(named: Sequence[File]) -> tuple[Descriptor, ...]:
    """One layer for each distinct blob, in that order."""
    files: dict[str, File] = {}
    for file in named:
        files.setdefault(file.blob, file)
    return tuple(
        describe(
            MAPPED_FILE if file.mapped else FILE,
            Blob(digest=file.blob, size=file.blob_size),
            {oci.TITLE: _title(file)},
        )
        for file in files.values()
    )


def _title(file: File) -> str:
    # Tools that unpack an artifact name files so: unique, though variants call different files alike.
    return f"{hex_of(file.blob)[:16]}-{file.name}" + ("" if file.mapped else ".zst")


def tag_bundle(store: Store, bundle: Bundle, tag: str) -> None:
    """Let `model:tag` name the bundle, and mark it as sparse where the store lacks some of its artifacts.

    The caller holds `store.sharing()` since it looked whether the blobs are there. Raises NotFoundError where the
    bundle's own blob is gone, ReferenceFormatError, StoreError.
    """
    annotations = {oci.MODEL: bundle.model, **created_annotation(bundle.created)}
    if not all(store.blobs.has(entry.digest, entry.size) for entry in bundle.artifacts):
        annotations[oci.SPARSE] = "true"
    size = store.blobs.size(bundle.digest) or 0
    store.set_tag(bundle.model, tag, Descriptor(oci.INDEX, bundle.digest, size, annotations=annotations))
