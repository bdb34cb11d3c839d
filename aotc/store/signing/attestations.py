"""Attestations of a bundle: in-toto statements in DSSE envelopes, as `cosign attest` stores them.

The bytes are specified in github.com/in-toto/attestation (statement), github.com/secure-systems-lab/dsse (envelope)
and, for their place in a registry, by cosign. aotc writes `aotc.verification.Verification`, and of a build what
`aotc.store.signing.build_statements` names; see `FORMAT.md`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import CorruptError, Issue, NotFoundError
from aotc.records import decode
from aotc.store.layout import oci
from aotc.store.layout.bundle import Bundle
from aotc.store.layout.names import hex_of
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.store import Store
from aotc.store.signing.attachments import (
    SIGNATURE,
    DocumentKind,
    Encoded,
    Layer,
    ReadBlob,
    ReadLayers,
    Resolve,
    attached_name,
    encode_layers,
    most_wanted_first,
    read_layers,
    reader_of,
    write_attached,
)
from aotc.store.signing.keys import PrivateKey, PublicKey
from aotc.verification import Verification

ENVELOPE = "application/vnd.dsse.envelope.v1+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
VERIFICATION = "https://aotc.dev/attestation/verification/v1"
PREDICATE_TYPE = "predicateType"  # cosign's annotation of the layer

ATTESTATIONS = DocumentKind("att", ENVELOPE, 1 << 20, "attestations")


class Attestation(NamedTuple):
    """A verification of the bundle `bundle`. `signers` are the fingerprints of the trusted keys that signed it;
    `keyids` are the keys that the envelope names, which nothing has checked."""

    bundle: str
    verification: Verification
    signers: tuple[str, ...] = ()
    keyids: tuple[str, ...] = ()


class ReadAttestations(NamedTuple):
    """The verifications of a bundle, the newest first, and what was wrong with documents that could not be read.

    Attestations with other predicates, like a build's provenance, are in neither.
    """

    found: list[Attestation]
    issues: list[Issue]


# -- the envelope -----------------------------------------------------------------------------------------------------


class _Signature(msgspec.Struct, frozen=True):
    sig: str
    keyid: str = ""


class _Envelope(msgspec.Struct, frozen=True, rename="camel"):
    payload_type: str
    payload: str
    signatures: tuple[_Signature, ...] = ()


class _Subject(msgspec.Struct, frozen=True):
    digest: dict[str, str]
    name: str = ""


class _Statement(msgspec.Struct, frozen=True, rename="camel"):
    type: str = msgspec.field(name="_type")
    subject: tuple[_Subject, ...]
    predicate_type: str
    predicate: msgspec.Raw = msgspec.Raw(b"null")


def encode_envelope(bundle: str, verification: Verification, key: PrivateKey | None = None) -> bytes:
    """The envelope of a verification of the bundle with that digest; without `key` an unsigned one."""
    return encode_statement(bundle, verification.model, VERIFICATION, msgspec.to_builtins(verification), key)


def encode_statement(
    bundle: str, model: str, predicate_type: str, predicate: Any, key: PrivateKey | None = None
) -> bytes:
    """The envelope of a statement about the bundle with that digest; without `key` an unsigned one."""
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": model, "digest": {"sha256": hex_of(bundle)}}],
        "predicateType": predicate_type,
        "predicate": predicate,
    }
    payload = canonical_json(statement)
    signatures = (
        ()
        if key is None
        else (_Signature(_base64(key.sign(signed_bytes(PAYLOAD_TYPE, payload))), key.public.fingerprint),)
    )
    return canonical_json(_Envelope(PAYLOAD_TYPE, _base64(payload), signatures))


def signed_bytes(payload_type: str, payload: bytes) -> bytes:
    """What is signed: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(payload_type.encode()), payload_type.encode(), len(payload), payload)


def decode_envelope(data: bytes, keys: Sequence[PublicKey] = ()) -> Attestation | None:
    """The verification in an envelope, with those of `keys` that signed it; None for another predicate.

    The signatures are checked before the payload is parsed, where there are keys. Raises CorruptError.
    """
    found = decode_statement(data, keys)
    if found is None or found.predicate_type != VERIFICATION:
        return None
    verification = decode(found.predicate, Verification)
    return Attestation(found.subject(), verification, found.signers, found.keyids)


class SignedStatement(NamedTuple):
    """An in-toto statement of any predicate; `signers` and `keyids` are as of `Attestation`."""

    subjects: frozenset[str]
    predicate_type: str
    predicate: bytes
    signers: tuple[str, ...]
    keyids: tuple[str, ...]

    def subject(self) -> str:
        """The digest of the one bundle that it is about. Raises CorruptError."""
        if len(self.subjects) != 1:
            count = len(self.subjects)
            raise CorruptError(f"the attestation is about {count} bundles", expected="1", actual=str(count))
        (bundle,) = self.subjects
        hex_of(bundle)
        return bundle


def decode_statement(data: bytes, keys: Sequence[PublicKey] = ()) -> SignedStatement | None:
    """The statement in an envelope; None for one of something else. As `decode_envelope`. Raises CorruptError."""
    opened = open_envelope(data, keys)
    if opened.payload_type != PAYLOAD_TYPE:
        return None
    statement = decode(opened.payload, _Statement)
    if statement.type != STATEMENT:
        return None
    subjects = frozenset(f"sha256:{subject.digest.get('sha256', '')}" for subject in statement.subject)
    return SignedStatement(
        subjects, statement.predicate_type, bytes(statement.predicate), opened.signers, opened.keyids
    )


class OpenEnvelope(NamedTuple):
    """A payload, those of the given keys that signed it, and the keys that the envelope names."""

    payload_type: str
    payload: bytes
    signers: tuple[str, ...]
    keyids: tuple[str, ...]


def open_envelope(data: bytes, keys: Sequence[PublicKey] = ()) -> OpenEnvelope:
    """Raises CorruptError."""
    envelope = decode(data, _Envelope)
    payload = _bytes(envelope.payload)
    signatures = [_bytes(one.sig) for one in envelope.signatures[:_SIGNATURES]]
    signed = signed_bytes(envelope.payload_type, payload)
    signers = tuple(key.fingerprint for key in keys if any(key.verifies(one, signed) for one in signatures))
    return OpenEnvelope(envelope.payload_type, payload, signers, tuple(one.keyid for one in envelope.signatures))


_SIGNATURES = 20  # of one envelope are looked at


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptError(f"the attestation's envelope is not base64: {error}") from error


# -- reading ----------------------------------------------------------------------------------------------------------


def read_attestations(
    read: ReadBlob, resolve: Resolve, digest: str, keys: Sequence[PublicKey] = ()
) -> ReadAttestations:
    """The verifications that are attached to the bundle `digest`; with `keys`, which of them signed each.

    `read` gives bytes by their digest (`reader_of(store)`), `resolve` the manifest that a name names
    (`store.attachment`), so it works over any store. Raises CorruptError where the manifest is not an
    attestation, NotFoundError, StoreError.
    """
    descriptor = resolve(attached_name(digest, ATTESTATIONS))
    if descriptor is None:
        return ReadAttestations([], [])
    layers, issues, *_ = read_envelopes(read, descriptor)
    found: list[Attestation] = []
    for layer in layers:
        where = f"layer {sha256_bytes(layer.data)[:19]}"
        try:
            attestation = decode_envelope(layer.data, keys)
            if attestation is None:
                continue
            if attestation.bundle != digest:
                raise CorruptError(f"it is about {attestation.bundle}", expected=digest, actual=attestation.bundle)
            found.append(attestation)
        except CorruptError as error:
            issues.append(Issue(error.message, where=where))
    return ReadAttestations(sorted(found, key=lambda one: one.verification.created, reverse=True), issues)


def read_envelopes(read: ReadBlob, descriptor: Descriptor) -> ReadLayers:
    """The envelopes of a manifest, of any predicate. Raises as `read_layers` does."""
    return read_layers(read, descriptor, ATTESTATIONS)


# -- writing ----------------------------------------------------------------------------------------------------------


def attest(store: Store, bundle: Bundle, verification: Verification, key: PrivateKey | None = None) -> Descriptor:
    """Attach a verification to a bundle of the store, beside those that it has. Returns their manifest.

    An older one of the same artifact that the same key has signed, or without a signature as this one, is replaced; one
    with limits of a gate only by another with limits.

    Raises NotFoundError where the bundle is not in the store, CorruptError, StoreError.
    """
    size = store.blobs.size(bundle.digest)
    if size is None:
        raise NotFoundError(f"{bundle.digest} is not in {store.path}", hint="fetch or build the bundle", known=())
    data = encode_envelope(bundle.digest, verification, key)
    return add_envelopes(store, bundle.digest, [Layer(data, _ANNOTATIONS)], () if key is None else (key.public,))


_ANNOTATIONS = ((SIGNATURE, ""), (PREDICATE_TYPE, VERIFICATION))  # as cosign writes them: the signature is in the layer


def add_envelopes(store: Store, digest: str, new: Sequence[Layer], keys: Sequence[PublicKey] = ()) -> Descriptor:
    """Put envelopes from elsewhere beside those that a bundle of the store has.

    One that a key of `keys` has signed replaces older ones by the same key. What the others say of their signer is not
    believed: none of them replaces another one. Raises as `attest` does.
    """
    subject = Descriptor(media_type=oci.INDEX, digest=digest, size=store.blobs.size(digest) or 0)

    def change(old: Descriptor | None) -> Descriptor:
        encoded = with_envelopes(reader_of(store), old, new, subject, keys)
        if encoded is None:
            assert old is not None
            return old
        return write_attached(store, encoded)

    return store.change_attachment(attached_name(digest, ATTESTATIONS), change)


def with_envelopes(
    read: ReadBlob, old: Descriptor | None, new: Sequence[Layer], subject: Descriptor, keys: Sequence[PublicKey] = ()
) -> Encoded | None:
    """The manifest `old` with these envelopes, too; None where it has them. `keys` are as in `add_envelopes`. Where
    they are too many, those stay that `keys` have signed, then the new ones. Raises as `read_layers` does."""
    there, _, others, _ = read_envelopes(read, old) if old else ReadLayers([], [], [])
    wanted = _merged(there, new, keys)
    if old is not None and wanted == there:
        return None
    wanted = most_wanted_first(wanted, new, lambda layer: is_envelope_by(layer, keys), len(others))
    return encode_layers(ATTESTATIONS, wanted, others, artifact_type=ENVELOPE, subject=subject)


def is_envelope_by(layer: Layer, keys: Sequence[PublicKey]) -> bool:
    """Whether one of `keys` has signed the envelope, whatever it states."""
    try:
        return bool(open_envelope(layer.data, keys).signers)
    except CorruptError:
        return False


def fetch_attestations(
    read: ReadBlob, resolve: Resolve, store: Store, digest: str, keys: Sequence[PublicKey] = ()
) -> Descriptor | None:
    """Take a bundle's attestations over from elsewhere, beside those that it has here; None where it has none there.

    `keys` are as in `add_envelopes`. Raises as `read_attestations` does.
    """
    descriptor = resolve(attached_name(digest, ATTESTATIONS))
    if descriptor is None:
        return None
    return add_envelopes(store, digest, read_envelopes(read, descriptor).layers, keys)


def _merged(there: Sequence[Layer], new: Sequence[Layer], keys: Sequence[PublicKey]) -> list[Layer]:
    """Equal layers are kept once. Of the verifications of one artifact that the same of `keys` signed, and of those
    without a signature, the newest with a gate's limits and the newest without are kept. All others are kept: anyone
    who can write to a store can name a key, and a future time."""
    newest: dict[Any, Layer] = {}
    times: dict[Any, datetime] = {}
    for layer in (*there, *new):
        about, created = _about(layer, keys) or (layer, datetime.min.replace(tzinfo=UTC))
        if about not in newest or created > times[about]:
            newest[about], times[about] = layer, created
    return list(newest.values())


def _about(layer: Layer, keys: Sequence[PublicKey]) -> tuple[Any, datetime] | None:
    """What an envelope is about, whether with limits, and which of `keys` have signed it; and its time. None for what
    is not a verification, or is not signed by a known key."""
    try:
        attestation = decode_envelope(layer.data, keys)
    except CorruptError:
        return None
    if attestation is None or (attestation.keyids and not attestation.signers):
        return None
    verification = attestation.verification
    about = attestation.bundle, verification.artifact, bool(verification.limits), attestation.signers
    return about, verification.created
