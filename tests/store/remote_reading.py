"""Reading a bundle as `load` does, without torch: in a test's process and in others."""

from __future__ import annotations

from pathlib import Path

from sample_artifacts import library_bytes

from aotc.store import HotCopies, parse_reference, read_artifact, read_bundle
from aotc.store.remote import Limits
from aotc.store.remote_store import RemoteStore
from aotc.store.transfer import OnEvent

QUICK = Limits(connect=5, read=5, total=60, attempts=2, backoff=0.01)

LIBRARIES = {"{'batch': 1}": library_bytes(1), "{'batch': 8}": library_bytes(8)}
"""What the artifact of `stored_artifact` holds, by bucket."""


def load_hot(where: str, cache: Path, limits: Limits = QUICK, on_event: OnEvent | None = None) -> dict[str, bytes]:
    """The libraries of the artifact for cpu:x86-64-v3 in the bundle `where`, from their hot copies in `cache`."""
    reference = parse_reference(where)
    remote = RemoteStore.cached(str(reference.store), cache, limits, on_event)
    bundle = read_bundle(remote, reference)
    (entry,) = [entry for entry in bundle.artifacts if entry.target == "cpu:x86-64-v3"]
    artifact, hot = read_artifact(remote, entry.digest), HotCopies(cache)
    folders = remote.each(lambda variant: hot.materialise(variant.files, remote.blobs), artifact.variants)
    return {str(v.bucket): (f / v.library).read_bytes() for v, f in zip(artifact.variants, folders, strict=True)}
