"""Reading a bundle as `load` does, without torch: in a test's process and in others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sample_artifacts import library_bytes

from aotc.records import Artifact, Variant
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.opening import open_transfer
from aotc.store.reference import Reference, is_remote, parse_reference
from aotc.store.remote.copied import Copied
from aotc.store.remote.fetching import fetch, of_targets
from aotc.store.remote.interface import Limits
from aotc.store.remote.remote_store import RemoteStore
from aotc.store.remote.transfer import OnTransfer

QUICK = Limits(connect=5, read=5, total=60, attempts=2, backoff=0.01)

LIBRARIES = {"{'batch': 1}": library_bytes(1), "{'batch': 8}": library_bytes(8)}
"""What the artifact of `stored_artifact` holds, by bucket."""


def libraries(store: Store, variants: Sequence[Variant]) -> list[bytes]:
    """The bytes that a load would open, of each variant's library."""
    from aotc.runtime.libraries.files import FilesInMemory

    found = []
    for variant in variants:
        with FilesInMemory(variant, store.blobs).opened() as path:
            found.append(Path(path).read_bytes())
    return found


def remote_store(url: str, limits: Limits = QUICK) -> RemoteStore:
    return RemoteStore(open_transfer(url, limits))


def fetch_all(
    source: Reference, path: Path, *, tag: str | None = None, targets: Sequence[str] = (), limits: Limits = QUICK
) -> Copied:
    """All of a bundle, or its artifacts for these targets, into a local store."""
    return fetch(source, path, of_targets(*targets), tag=tag, limits=limits)


def local_artifact(
    reference: Reference, cache: Path, limits: Limits = QUICK, on_event: OnTransfer | None = None, target: str = ""
) -> tuple[Store, Artifact]:
    """The artifact of a bundle in a local store: of a remote one, it is fetched into `cache` first."""
    where = str(reference.store)
    if is_remote(where):
        wanted, where = of_targets(*filter(None, [target])), str(cache / "store")
        copied = fetch(reference, cache / "store", wanted, limits=limits, on_event=on_event)
        reference = Reference(None, parse_reference(copied.reference).model, digest=copied.digest)
    store = Store.open(where)
    (entry,) = [entry for entry in read_bundle(store, reference).artifacts if target in ("", entry.target)]
    return store, read_artifact(store, entry)


def load_hot(where: str, cache: Path, limits: Limits = QUICK, on_event: OnTransfer | None = None) -> dict[str, bytes]:
    """The libraries of the artifact for cpu:x86-64-v3 in the bundle `where`, fetched into `cache`."""
    store, artifact = local_artifact(parse_reference(where), cache, limits, on_event, "cpu:x86-64-v3")
    read = libraries(store, artifact.variants)
    return {str(variant.bucket): data for variant, data in zip(artifact.variants, read, strict=True)}
