"""Copies a bundle from a store to a remote. Bytes are copied unchanged, so digests do not change."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from aotc.errors import NotFoundError, ReferenceFormatError, RemoteError
from aotc.store.layout import oci
from aotc.store.layout.bundle import Bundle, read_bundle
from aotc.store.layout.check_record import check_entry
from aotc.store.layout.oci import Descriptor, ImageManifest
from aotc.store.layout.store import Store
from aotc.store.opening import open_transfer
from aotc.store.reference import REGISTRY_SCHEMES, Reference, is_remote, parse_reference
from aotc.store.remote.copied import Copied, blobs_of, check_whole, copied
from aotc.store.remote.interface import Limits
from aotc.store.remote.transfer import OnTransfer, Transfer
from aotc.store.signing.attachments import Encoded, attached_name, reader_of
from aotc.store.signing.attestations import ATTESTATIONS, read_envelopes, with_envelopes
from aotc.store.signing.keys import PublicKey
from aotc.store.signing.signatures import (
    ReadSignatures,
    SignedPayload,
    encode_signatures,
    merged,
    read_signatures,
    signature_tag,
    signatures_of,
)


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
    keys: Sequence[PublicKey] = (),
    on_event: OnTransfer | None = None,
) -> Copied:
    """Upload what the destination lacks of a bundle, blobs first, and last let its tag name the bundle.

    Attestations that one of `keys` has signed replace older ones by the same key there. Where there are too many, what
    `keys` have signed stays, then what is pushed.

    Raises NotFoundError, also for blobs that the store lacks, which is looked at first; CorruptError, RemoteError;
    ReferenceFormatError where the destination is not a remote's tag, or one of another model.
    """
    began = time.monotonic()
    bundle = read_bundle(store, reference)
    _check_destination(destination, bundle)
    if absent := [entry.target for entry in bundle.artifacts if not store.blobs.has(entry.digest, entry.size)]:
        raise NotFoundError(
            f"{reference.name} was fetched without its artifacts for {', '.join(absent)}, and cannot be pushed",
            hint="fetch all of it: aotc fetch REF --all",
            known=(),
            digest=bundle.digest,
        )
    manifests = [store.blobs.read(entry.digest, oci.MANIFEST_LIMIT) for entry in bundle.artifacts]
    blobs = blobs_of([oci.decode(data, ImageManifest, bundle.digest) for data in manifests])
    for entry in bundle.artifacts:
        check_entry(store, entry)
    check_whole(store, bundle.digest, blobs)
    transfer = open_transfer(str(destination.store), limits, on_event)
    moved = transfer.each(lambda blob: transfer.upload(blob, store.blobs.path(blob.digest)), blobs)
    for data in manifests:
        transfer.retrying(lambda data=data: transfer.remote.put_document(oci.MANIFEST, data))  # type: ignore[misc]
    _push_signatures(transfer, store, bundle.digest, keys)  # before the tag, so that a reader of the tag finds them
    push_attestations(transfer, store, bundle.digest, keys)
    index = store.blobs.read(bundle.digest, oci.MANIFEST_LIMIT)
    transfer.retrying(lambda: transfer.remote.set_tag(destination, oci.INDEX, index))
    return copied(transfer, destination, bundle.digest, bundle.artifacts, blobs, sum(moved), began)


def _push_signatures(transfer: Transfer, store: Store, digest: str, keys: Sequence[PublicKey]) -> None:
    if (ours := signatures_of(store, digest)) is not None:
        push_signatures(transfer, digest, read_signatures(reader_of(store), ours).signatures, keys)


def push_signatures(
    transfer: Transfer, digest: str, new: Sequence[SignedPayload], keys: Sequence[PublicKey] = ()
) -> None:
    """Put signatures of the bundle or document with that digest beside those that are there, of any key; where they are
    too many, those by `keys` stay, then the new ones."""

    def change(theirs: Descriptor | None) -> Encoded | None:
        there = read_signatures(transfer.read, theirs) if theirs else ReadSignatures([], [], [])
        wanted = merged(there.signatures, new, datetime.now(UTC))
        return None if wanted == there.signatures else encode_signatures(wanted, there.others, new, keys)

    change_attachment(transfer, signature_tag(digest), change)


def push_attestations(transfer: Transfer, store: Store, digest: str, keys: Sequence[PublicKey] = ()) -> None:
    """Put the bundle's attestations beside those that are there; `keys` and errors are as in `push`."""
    name = attached_name(digest, ATTESTATIONS)
    if (ours := store.attachment(name)) is None:
        return
    new = read_envelopes(reader_of(store), ours).layers
    subject = Descriptor(media_type=oci.INDEX, digest=digest, size=store.blobs.size(digest) or 0)
    change_attachment(transfer, name, lambda theirs: with_envelopes(transfer.read, theirs, new, subject, keys))


def change_attachment(transfer: Transfer, name: str, change: Callable[[Descriptor | None], Encoded | None]) -> None:
    """Write what `change` makes of the manifest that is there; None where nothing is to be changed."""
    remote = transfer.remote
    for _ in range(_ROUNDS):  # each checks afterwards whether another client wrote meanwhile
        theirs = transfer.retrying(lambda: remote.attachment(name))
        encoded = change(theirs)
        if encoded is None:
            return
        for data in encoded.blobs:
            transfer.retrying(lambda data=data: remote.put_document(_BLOB, data))  # type: ignore[misc]
        transfer.retrying(lambda: remote.set_attachment(name, encoded.manifest, theirs))  # noqa: B023
    raise RemoteError(
        f"{name} was changed by others {_ROUNDS} times while it was to be written",
        hint="push again",
        url=transfer.url,
        transient=True,
    )


_ROUNDS = 10
_BLOB = "application/octet-stream"


def _check_destination(destination: Reference, bundle: Bundle) -> None:
    if not is_remote(destination.store) or destination.tag is None:
        raise ReferenceFormatError(
            f"{destination} is not a tag of a remote, and cannot be pushed to",
            hint="write oci://HOST/REPOSITORY:tag, s3://BUCKET/PREFIX#model:tag, hf://ORG/REPO#model:tag or "
            "file:///FOLDER#model:tag",
        )
    if not destination.in_registry and destination.model != bundle.model:
        raise ReferenceFormatError(
            f"a bundle of the model {bundle.model!r} cannot be pushed as {destination.model!r}",
            hint=f"write {destination.store}#{bundle.model}:{destination.tag}",
        )
