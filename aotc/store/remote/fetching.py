"""Copies a bundle, or some of its artifacts, from a remote into a local store. Digests do not change."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from aotc.errors import NotFoundError, ReferenceFormatError
from aotc.records import Artifact
from aotc.store.files.store_locks import locked
from aotc.store.layout import oci
from aotc.store.layout.bundle import Bundle, BundleEntry, read_artifact
from aotc.store.layout.names import hex_of
from aotc.store.layout.near_stores import nearest_first
from aotc.store.layout.oci import Descriptor, ImageManifest
from aotc.store.layout.publishing import tag_bundle
from aotc.store.layout.store import Store
from aotc.store.opening import open_transfer
from aotc.store.reference import Reference, is_remote
from aotc.store.remote.copied import Copied, blobs_of, check_whole, copied
from aotc.store.remote.interface import Limits
from aotc.store.remote.remote_store import RemoteStore
from aotc.store.remote.transfer import OnTransfer
from aotc.store.signing.attestations import fetch_attestations
from aotc.store.signing.signatures import fetch_signatures
from aotc.store.signing.trust import TrustedKeys, read_trusted

_log = logging.getLogger("aotc")

Choose = Callable[[Sequence[BundleEntry], Callable[[BundleEntry], Artifact]], Sequence[BundleEntry]]
"""Which artifacts of a bundle to fetch; the second argument reads a record, which costs two requests."""


def fetch(
    source: Reference,
    path: Path,
    choose: Choose,
    *,
    tag: str | None = None,
    trust: TrustedKeys | None = None,
    limits: Limits | None = None,
    on_event: OnTransfer | None = None,
) -> Copied:
    """Download what the store at `path` lacks of a bundle, blobs first, and last let `model:tag` name it.

    The store is made if there is none. `tag` is the source's where none is given; a bundle that was asked for by its
    digest has the tag `sha256-<first 16 digits>`. Signatures come with the bundle. A fetch that broke goes on where it
    broke. Nothing is written where everything is there.

    Raises NotFoundError, CorruptError, RemoteError, StoreError; SignatureError where `trust` is not met,
    UnverifiedError where it requires statements of the build that are not there;
    ReferenceFormatError where the source is not a remote; what `choose` raises.
    """
    began = time.monotonic()
    if not is_remote(source.store):
        raise ReferenceFormatError(
            f"{source} names no remote, and cannot be fetched",
            hint="write oci://HOST/REPO:tag, s3://BUCKET/PREFIX#model:tag, or file:///FOLDER#model:tag of a folder",
        )
    transfer = open_transfer(str(source.store), limits, on_event)
    store = Store(path)
    remote = RemoteStore(transfer, store.blobs)
    found = remote.resolve(source)
    with _leaving_no_folder(path), _one_process(store, found, transfer.limits.total):
        bundle = read_trusted(remote, source, trust)
        if trust is not None and trust.required:
            from aotc.store.signing.build_statements import check_required, parse_requirements

            check_required(remote, bundle.digest, source.name, parse_requirements(trust.required), trust.keys)
        chosen = choose(bundle.artifacts, lambda entry: read_artifact(remote, entry))
        documents = [remote.blobs.read(entry.digest, oci.MANIFEST_LIMIT) for entry in chosen]
        manifests = [oci.decode(data, ImageManifest, one.digest) for data, one in zip(documents, chosen, strict=True)]
        layers, moved = blobs_of(manifests, configs=False), 0
        name = tag or source.tag or f"sha256-{hex_of(bundle.digest)[:16]}"
        if not _is_there(store, bundle, tag or source.tag, chosen, manifests):
            from aotc.store.layout.check_record import check_entry  # not where everything is there

            transfer.each(lambda entry: check_entry(remote, entry), chosen)
            store = Store.create(path)  # no sooner: what cannot be found leaves no empty store
            with store.writing("aotc fetch"):
                moved = sum(transfer.each(lambda blob: transfer.fetch(blob, store.blobs, durable=True), layers))
                keys = trust.keys if trust else ()
                fetch_signatures(transfer.read, remote.attachment, store, bundle.digest, keys)
                fetch_attestations(transfer.read, remote.attachment, store, bundle.digest, keys)
                _publish_copy(store, bundle, name, chosen, manifests, remote)
    done = copied(transfer, Reference(str(path), bundle.model, tag=name), bundle.digest, chosen, layers, moved, began)
    _log.info(
        "fetched %s, %s, for %s to %s: %d of %d blobs were not there; %d requests, %d bytes in %.1f ms",
        source,
        done.digest,
        ", ".join(done.targets),
        path,
        done.moved,
        done.blobs,
        done.requests,
        done.received,
        1000 * done.seconds,
    )
    return done


@contextmanager
def _leaving_no_folder(path: Path) -> Iterator[None]:
    """Where what is asked for is refused, a folder that was not there is not there afterwards: it would be no store."""
    was_there = path.exists()
    try:
        yield
    except BaseException:
        if not was_there and not (path / "oci-layout").exists():
            shutil.rmtree(path / ".aotc", ignore_errors=True)
            with suppress(OSError):
                path.rmdir()
        raise


def _one_process(store: Store, bundle: Descriptor, timeout: float) -> AbstractContextManager[None]:
    """Let one of several processes request the documents of a new bundle: registries count and limit requests.

    A lock is never removed, so that there are 16 in all.
    """
    if store.blobs.has(bundle.digest, bundle.size):
        return nullcontext()
    return locked(store.path / ".aotc" / f"fetch-{hex_of(bundle.digest)[0]}.lock", timeout)


def of_targets(*targets: str) -> Choose:
    """The artifacts for these targets; all of them, where none is named. Raises NotFoundError."""

    def choose(entries: Sequence[BundleEntry], _: object) -> Sequence[BundleEntry]:
        there = [entry.target for entry in entries]
        if missing := [target for target in targets if target not in there]:
            raise NotFoundError(
                f"the bundle has no artifact for {', '.join(missing)}",
                hint=f"it has {', '.join(there)}",
                known=tuple(nearest_first(missing[0], there)),
            )
        return [entry for entry in entries if not targets or entry.target in targets]

    return choose


def _is_there(
    store: Store, bundle: Bundle, tag: str | None, chosen: Sequence[BundleEntry], manifests: Sequence[ImageManifest]
) -> bool:
    """Whether the tag, or any, names the bundle already, and everything that was chosen of it is there."""
    blobs = [(entry.digest, entry.size) for entry in chosen]
    blobs += [(blob.digest, blob.size) for blob in blobs_of(manifests)]
    if store.blobs.size(bundle.digest) is None or not all(store.blobs.has(*blob) for blob in blobs):
        return False
    tags = {one.tag for one in store.tags() if (one.model, one.digest) == (bundle.model, bundle.digest)}
    return bool(tags) if tag is None else tag in tags


def _publish_copy(
    store: Store,
    bundle: Bundle,
    tag: str,
    chosen: Sequence[BundleEntry],
    manifests: Sequence[ImageManifest],
    remote: RemoteStore,
) -> None:
    """Write records, manifests and the bundle, and set the tag. Raises NotFoundError where something has removed a blob
    since it came."""
    with store.sharing():  # what was seen to be there stays there until the tag names it
        check_whole(store, bundle.digest, blobs_of(manifests, configs=False))
        for entry, manifest in zip(chosen, manifests, strict=True):
            store.blobs.put_bytes(remote.blobs.read(manifest.config.digest, manifest.config.size))
            store.blobs.put_bytes(remote.blobs.read(entry.digest, oci.MANIFEST_LIMIT))
        store.blobs.put_bytes(remote.blobs.read(bundle.digest, oci.MANIFEST_LIMIT))
        tag_bundle(store, bundle, tag)
