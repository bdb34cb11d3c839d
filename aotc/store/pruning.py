"""Removes a bundle's signatures and attestations by untrusted keys: anyone who may push can attach some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from aotc.errors import SignatureError
from aotc.records import Record
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.store import Store
from aotc.store.opening import open_readable
from aotc.store.reference import Reference, is_remote
from aotc.store.remote.push import change_attachment
from aotc.store.remote.remote_store import RemoteStore
from aotc.store.signing.attachments import (
    DocumentKind,
    Encoded,
    Layer,
    ReadBlob,
    attached_name,
    encode_layers,
    read_layers,
    reader_of,
    write_attached,
)
from aotc.store.signing.attestations import ATTESTATIONS, ENVELOPE, is_envelope_by
from aotc.store.signing.keys import PublicKey
from aotc.store.signing.signatures import SIGNATURES, is_signature_by

_IS_BY: dict[DocumentKind, Callable[[Layer, Sequence[PublicKey]], bool]] = {
    SIGNATURES: is_signature_by,
    ATTESTATIONS: is_envelope_by,
}


class Pruned(Record, frozen=True):
    """Of one kind ("signatures", "attestations"), how many documents the bundle keeps, and how many were removed."""

    kind: str
    kept: int
    removed: int


def prune(where: str, reference: Reference, keys: Sequence[PublicKey]) -> list[Pruned]:
    """Remove what none of `keys` has signed from the bundle in the folder, or at the URL, `where`; also what cannot be
    read, and documents of other types, as cosign's signatures without a key.

    Gives a row for each kind of which the bundle has any. Raises SignatureError without keys; NotFoundError,
    CorruptError, RemoteError, StoreError.
    """
    if not keys:
        raise SignatureError(
            "without trusted keys all signatures and attestations would go", hint="give --key, or set AOTC_TRUSTED_KEYS"
        )
    store = open_readable(where) if is_remote(where) else Store.open(Path(where))
    bundle = read_bundle(store, reference)
    subject = store.resolve(reference)
    return [
        _prune_kind(store, kind, attached_name(bundle.digest, kind), subject, keys)
        for kind in _IS_BY
        if store.attachment(attached_name(bundle.digest, kind)) is not None
    ]


def _prune_kind(store: object, kind: DocumentKind, name: str, subject: Descriptor, keys: Sequence[PublicKey]) -> Pruned:
    pruned = Pruned(kind.called, 0, 0)

    def without_others(read: ReadBlob, old: Descriptor | None) -> Encoded | None:
        """None where nothing is to go."""
        nonlocal pruned
        if old is None:
            return None
        found = read_layers(read, old, kind)
        kept = [layer for layer in found.layers if _IS_BY[kind](layer, keys)]
        gone = found.total - len(kept)
        pruned = Pruned(kind.called, len(kept), max(gone, pruned.removed))  # a remote is looked at again afterwards
        if not gone:
            return None
        if kind is ATTESTATIONS:
            return encode_layers(kind, kept, artifact_type=ENVELOPE, subject=subject)
        return encode_layers(kind, kept)

    if isinstance(store, RemoteStore):
        transfer = store.transfer
        change_attachment(transfer, name, lambda theirs: without_others(transfer.read, theirs))
        return pruned
    assert isinstance(store, Store)

    def change(old: Descriptor | None) -> Descriptor:
        assert old is not None
        encoded = without_others(reader_of(store), old)
        return old if encoded is None else write_attached(store, encoded)

    store.change_attachment(name, change)
    return pruned
