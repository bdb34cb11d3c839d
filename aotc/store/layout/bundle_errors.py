"""Errors of bundles and artifacts that are not what their names, their types or their sizes say."""

from __future__ import annotations

from collections.abc import Sequence

from aotc.errors import CorruptError, SchemaVersionError, StoreError
from aotc.records import OTHER_VERSION
from aotc.store.layout import oci
from aotc.store.layout.name_flaws import not_a_digest
from aotc.store.layout.names import is_digest, name_flaw
from aotc.store.layout.oci import Descriptor, ImageIndex, ImageManifest
from aotc.store.reference import Reference


def unsound_bundle(reference: Reference, digest: str, index: ImageIndex) -> CorruptError:
    """Of what is not a bundle, or not that of the reference, or one with an entry that is not its model's artifact."""
    model = index.annotation(oci.MODEL)
    if (model != reference.model and not reference.in_registry) or name_flaw(model):
        return _other_bundle(reference, digest, model)
    for entry in index.manifests:
        if not is_digest(entry.digest):
            return not_a_digest(entry.digest)
        if not entry.is_artifact(model):
            return _bad_entry(entry, model)
    return _equal_targets(digest, [entry.annotation(oci.TARGET) for entry in index.manifests])


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


def _equal_targets(digest: str, targets: Sequence[str]) -> CorruptError:
    return CorruptError(
        f"{digest} has more than one artifact for a target: {', '.join(sorted(targets))[:500]}",
        hint="it was not written by aotc, or was changed: build it again",
        expected="one for each target",
        actual=f"{len(targets)} for {len(set(targets))} targets",
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


def other_artifact(digest: str, named: tuple[str, str], said: tuple[str, str]) -> CorruptError:
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


def other_size(descriptor: Descriptor, size: int) -> CorruptError:
    return CorruptError(
        f"{descriptor.digest} has {size} bytes; its descriptor says {descriptor.size}",
        expected=str(descriptor.size),
        actual=str(size),
    )


def other_types(manifest: ImageManifest, artifact_type: str, config_type: str, digest: str) -> StoreError:
    """Of a manifest that is of another type, or its config."""
    what, found, supported = "artifact type", manifest.artifact_type, artifact_type
    if found == supported:
        what, found, supported = "config type", manifest.config.media_type, config_type
    message = f"the {what} of {digest} is {found!r}; this aotc reads {supported!r}"
    if found.startswith("application/vnd.aotc."):
        return SchemaVersionError(message, hint=OTHER_VERSION, found=found, supported=supported)
    return CorruptError(message, hint="it is not an aotc artifact", expected=supported, actual=found)
