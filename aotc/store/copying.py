"""Bundles between a store and a remote: push and pull. Bytes are copied as they are, so every digest stays."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from aotc.digest import canonical_json
from aotc.errors import NotFoundError, ReferenceFormatError, RemoteError
from aotc.records import Record
from aotc.store import oci
from aotc.store.blobs import Blob
from aotc.store.bundle import Bundle, BundleEntry, read_artifact, read_bundle
from aotc.store.layout import Store
from aotc.store.names import nearest_first
from aotc.store.oci import Descriptor, Manifest
from aotc.store.reference import REGISTRY_SCHEMES, Reference, parse_reference
from aotc.store.remote import Limits, is_remote
from aotc.store.remote_store import RemoteBlobs, RemoteStore
from aotc.store.signatures import (
    ReadSignatures,
    Signature,
    encode_signatures,
    fetch_signatures,
    merged,
    read_signatures,
    reader_of,
    signature_tag,
    signatures_of,
)
from aotc.store.transfer import OnEvent, Transfer

PART_OF = "dev.aotc.part-of"
"""Annotation of a bundle that holds some of another one's artifacts: the other one's digest."""


class Copied(Record, frozen=True):
    """What a push or pull did: what the reference names now, and what it took.

    `blobs` of `size` bytes belong to the bundle, documents not counted; `moved` of them were not there yet. `requests`,
    `received` and `sent` (bytes of bodies) are what went over the network.
    """

    reference: str
    digest: str
    targets: tuple[str, ...]
    blobs: int
    size: int
    moved: int
    requests: int
    received: int
    sent: int
    seconds: float


def parse_destination(text: str, reference: Reference) -> Reference:
    """Where to push `reference` to: `oci://HOST/REPO:tag`, `URL#model:tag`, or a URL alone, for the same model and tag.

    Raises ReferenceFormatError.
    """
    if is_remote(text) and "#" not in text and text.partition("://")[0] not in REGISTRY_SCHEMES:
        return Reference(text, reference.model, tag=reference.tag, digest=reference.digest)
    return parse_reference(text)


def push(
    store: Store,
    reference: Reference,
    destination: Reference,
    *,
    limits: Limits | None = None,
    on_event: OnEvent | None = None,
) -> Copied:
    """Upload what the destination lacks of a bundle, blobs first, and last let its tag name the bundle.

    Raises NotFoundError, also for blobs that the store lacks, which is looked at first; CorruptError, RemoteError;
    ReferenceFormatError where the destination is no remote's tag, or one of another model.
    """
    began = time.monotonic()
    bundle = read_bundle(store, reference)
    _check_destination(destination, bundle)
    manifests = [store.blobs.read(entry.digest, oci.MANIFEST_LIMIT) for entry in bundle.artifacts]
    blobs = _blobs_of([oci.decode_manifest(data, bundle.digest) for data in manifests])
    for entry in bundle.artifacts:
        read_artifact(store, entry)  # checks it
    _check_whole(store, bundle.digest, blobs)
    transfer = Transfer(str(destination.store), limits, on_event)
    moved = transfer.each(lambda blob: transfer.upload(blob, store.blobs.path(blob.digest)), blobs)
    for data in manifests:
        transfer.retrying(lambda data=data: transfer.remote.put_document(oci.MANIFEST, data))  # type: ignore[misc]
    _push_signatures(transfer, store, bundle.digest)  # before the tag: whoever checks them finds them
    index = store.blobs.read(bundle.digest, oci.MANIFEST_LIMIT)
    transfer.retrying(lambda: transfer.remote.set_tag(destination, oci.INDEX, index))
    return _copied(transfer, destination, bundle.digest, bundle.artifacts, blobs, sum(moved), began)


def pull(
    source: Reference,
    path: Path,
    *,
    tag: str | None = None,
    targets: Collection[str] = (),
    limits: Limits | None = None,
    on_event: OnEvent | None = None,
) -> Copied:
    """Download what the store at `path` lacks of a bundle, blobs first, and last let `model:tag` name it.

    The store is made if there is none. `tag` is the source's where none is given. With `targets`, only those artifacts
    come, in a bundle of their own whose annotation `dev.aotc.part-of` is the digest of the whole one; the signatures of
    the whole one say nothing of it, and stay behind. A pull that broke goes on where it broke.

    Raises NotFoundError, also for a target that the bundle has not got; CorruptError, RemoteError, StoreError;
    ReferenceFormatError where the source is no remote or there is no tag.
    """
    began = time.monotonic()
    tag = tag or source.tag
    if not is_remote(source.store) or tag is None:
        raise ReferenceFormatError(
            f"{source} {'names no remote' if tag else 'has no tag'}, and cannot be pulled",
            hint="write oci://HOST/REPO:tag, s3://BUCKET/PREFIX#model:tag, or file:///FOLDER#model:tag of a folder; a "
            "digest needs --tag as well",
        )
    transfer = Transfer(str(source.store), limits, on_event)
    documents = _Documents(transfer, Store(path))
    remote = RemoteStore(transfer, documents)
    bundle = read_bundle(remote, source)
    entries = _chosen(bundle, targets)
    transfer.each(lambda entry: read_artifact(remote, entry), entries)  # checks them, and keeps their bytes
    manifests = [
        oci.decode_manifest(documents.read(entry.digest, oci.MANIFEST_LIMIT), entry.digest) for entry in entries
    ]
    layers = _blobs_of(manifests, configs=False)
    store = Store.create(path)  # no sooner: what cannot be found leaves no empty store
    with store.writing("aotc pull"):
        moved = transfer.each(lambda blob: transfer.fetch(blob, store.blobs, durable=True), layers)
        if len(entries) == len(bundle.artifacts):
            fetch_signatures(transfer.read, remote.attachment, store, bundle.digest)
        digest = _publish_copy(store, bundle, entries, documents, manifests, tag)
    return _copied(
        transfer, Reference(str(store.path), bundle.model, tag=tag), digest, entries, layers, sum(moved), began
    )


def _push_signatures(transfer: Transfer, store: Store, digest: str) -> None:
    """Put the bundle's signatures beside those that are there, whoever made them."""
    ours = signatures_of(store, digest)
    if ours is None:
        return
    new = read_signatures(reader_of(store), ours).signatures
    for _ in range(_ROUNDS):  # after each it is looked whether somebody else wrote meanwhile
        if _have_signatures(transfer, signature_tag(digest), new):
            return
    raise RemoteError(
        f"the signatures of {digest} were changed by others {_ROUNDS} times while they were to be written",
        hint="push again",
        url=transfer.url,
        transient=True,
    )


def _have_signatures(transfer: Transfer, name: str, new: Sequence[Signature]) -> bool:
    """Whether these were there already; else they may be now."""
    remote = transfer.remote
    theirs = transfer.retrying(lambda: remote.attachment(name))
    there = read_signatures(transfer.read, theirs) if theirs else ReadSignatures([], [], [])
    wanted = merged(there.signatures, new, datetime.now(UTC))
    if wanted == there.signatures:
        return True
    encoded = encode_signatures(wanted, there.others)
    for data in encoded.blobs:
        transfer.retrying(lambda data=data: remote.put_document(_BLOB, data))  # type: ignore[misc]
    transfer.retrying(lambda: remote.set_attachment(name, encoded.manifest, theirs))
    return False


_ROUNDS = 10
_BLOB = "application/octet-stream"


class _Documents(RemoteBlobs):
    """Documents from the store where they are there, else from the remote; the store gets them after the blobs."""

    def __init__(self, transfer: Transfer, store: Store) -> None:
        super().__init__(transfer, None)
        self._store = store
        self._fetched_documents: dict[str, bytes] = {}

    def _cached(self, digest: str, limit: int) -> bytes | None:
        if digest in self._fetched_documents:
            return self._fetched_documents[digest]
        return None if self._store.blobs.size(digest) is None else self._store.blobs.read(digest, limit)

    def _keep(self, digest: str, data: bytes) -> None:
        self._fetched_documents[digest] = data


def _publish_copy(
    store: Store,
    bundle: Bundle,
    entries: Sequence[BundleEntry],
    documents: _Documents,
    manifests: Sequence[Manifest],
    tag: str,
) -> str:
    """Write records, manifests and the bundle, and set the tag; the digest that it names.

    Raises NotFoundError where something has removed a blob since it came.
    """
    index = documents.read(bundle.digest, oci.MANIFEST_LIMIT)
    if len(entries) < len(bundle.artifacts):
        index = _part(index, bundle.digest, {entry.digest for entry in entries})
    annotations = {oci.MODEL: bundle.model, oci.CREATED: bundle.created}
    with store.sharing():  # what was seen to be there stays there until the tag names it
        _check_whole(store, bundle.digest, _blobs_of(manifests, configs=False))
        for entry, manifest in zip(entries, manifests, strict=True):
            store.blobs.put_bytes(documents.read(manifest.config.digest, manifest.config.size))
            store.blobs.put_bytes(documents.read(entry.digest, oci.MANIFEST_LIMIT))
        blob = store.blobs.put_bytes(index)
        named = Descriptor(media_type=oci.INDEX, digest=blob.digest, size=blob.size, annotations=annotations)
        store.set_tag(bundle.model, tag, named)
    return blob.digest


def _part(data: bytes, digest: str, kept: Collection[str]) -> bytes:
    index = oci.decode_index(data, digest)
    return canonical_json(
        msgspec.structs.replace(
            index,
            manifests=tuple(one for one in index.manifests if one.digest in kept),
            annotations={**(index.annotations or {}), PART_OF: digest},
        )
    )


def _chosen(bundle: Bundle, targets: Collection[str]) -> list[BundleEntry]:
    there = [entry.target for entry in bundle.artifacts]
    if missing := [target for target in targets if target not in there]:
        raise NotFoundError(
            f"the bundle {bundle.digest} has no artifact for {', '.join(missing)}",
            hint=f"it has {', '.join(there)}",
            known=tuple(nearest_first(missing[0], there)),
        )
    return [entry for entry in bundle.artifacts if not targets or entry.target in targets]


def _blobs_of(manifests: Sequence[Manifest], *, configs: bool = True) -> list[Blob]:
    """Every blob that the manifests name, once."""
    named = [one for manifest in manifests for one in (*((manifest.config,) if configs else ()), *manifest.layers)]
    return list({one.digest: Blob(digest=one.digest, size=one.size) for one in named}.values())


def _check_destination(destination: Reference, bundle: Bundle) -> None:
    if not is_remote(destination.store) or destination.tag is None:
        raise ReferenceFormatError(
            f"{destination} is no tag of a remote, and cannot be pushed to",
            hint="write oci://HOST/REPOSITORY:tag, or s3://BUCKET/PREFIX#model:tag; into a folder it is pulled: "
            "aotc pull file:///FROM#model:tag --store TO",
        )
    if not destination.in_registry and destination.model != bundle.model:
        raise ReferenceFormatError(
            f"a bundle of the model {bundle.model!r} cannot be pushed as {destination.model!r}",
            hint=f"write {destination.store}#{bundle.model}:{destination.tag}",
        )


def _check_whole(store: Store, digest: str, blobs: Sequence[Blob]) -> None:
    """Before a tag names the bundle with that digest, here or there. Raises NotFoundError."""
    missing = [blob.digest for blob in blobs if not store.blobs.has(blob.digest, blob.size)]
    if missing:
        raise NotFoundError(
            f"{len(missing)} of the blobs of {digest} are not in {store.path}, the first is {missing[0]}",
            hint="build or pull the bundle again",
            known=(),
            digest=missing[0],
        )


def _copied(
    transfer: Transfer,
    reference: Reference,
    digest: str,
    entries: Sequence[BundleEntry],
    blobs: Sequence[Blob],
    moved: int,
    began: float,
) -> Copied:
    traffic = transfer.traffic
    return Copied(
        reference=str(reference),
        digest=digest,
        targets=tuple(entry.target for entry in entries),
        blobs=len(blobs),
        size=sum(blob.size for blob in blobs),
        moved=moved,
        requests=traffic.requests,
        received=traffic.received,
        sent=traffic.sent,
        seconds=round(time.monotonic() - began, 3),
    )
