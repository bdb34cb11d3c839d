"""Signatures of bundles, in cosign's key-based format for OCI artifacts.

The bytes are cosign's, specified in github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md: the tag
`sha256-<hex of the bundle>.sig` names an image manifest, each layer of which is one signed payload with its signature
as an annotation. What the payload claims beyond cosign's own fields stands under `optional`; see `FORMAT.md`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

import msgspec

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import CorruptError, Issue
from aotc.records import decode
from aotc.store.layout.names import hex_of
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.store import Store
from aotc.store.signing.attachments import (
    SIGNATURE,
    DocumentKind,
    Encoded,
    Layer,
    ReadBlob,
    Resolve,
    attached_name,
    encode_layers,
    most_wanted_first,
    read_layers,
    reader_of,
    write_attached,
)
from aotc.store.signing.keys import PrivateKey, PublicKey

PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"
TYPE = "cosign container image signature"

NAME = "dev.aotc.name"
SIGNED = "dev.aotc.signed"
EXPIRES = "dev.aotc.expires"

PAYLOAD_LIMIT = 64 << 10

SIGNATURES = DocumentKind("sig", PAYLOAD, PAYLOAD_LIMIT, "signatures")


class Claims(msgspec.Struct, frozen=True):
    """What a payload says: the bundle's digest and, where it says so, the name it is signed for and the times."""

    digest: str
    reference: str
    name: str = ""
    signed: datetime | None = None
    expires: datetime | None = None


class SignedPayload(NamedTuple):
    """A signed payload, and what signs it; neither has been checked.

    `annotations` are what its layer says besides: cosign's certificate, and its entry in a transparency log.
    """

    payload: bytes
    signature: bytes
    annotations: tuple[tuple[str, str], ...] = ()


class ReadSignatures(NamedTuple):
    """The signatures of one manifest, what was wrong with the layers that hold none, and those of other types."""

    signatures: list[SignedPayload]
    issues: list[Issue]
    others: list[Descriptor]


def signature_tag(digest: str) -> str:
    """Where cosign looks for the signatures of the bundle with that digest. Raises CorruptError for no digest."""
    return attached_name(digest, SIGNATURES)


# -- the payload ------------------------------------------------------------------------------------------------------


class _Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    docker_manifest_digest: str


class _Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    docker_reference: str


class _Critical(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The simple signing format: a reader that does not know one of these fields must refuse the payload."""

    identity: _Identity
    image: _Image
    type: str


class _Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    critical: _Critical
    optional: dict[str, Any] | None = None


def encode_payload(claims: Claims) -> bytes:
    """The bytes that are signed."""
    optional = {NAME: claims.name, SIGNED: _time_text(claims.signed), EXPIRES: _time_text(claims.expires)}
    critical = _Critical(_Identity(claims.reference), _Image(claims.digest), TYPE)
    return canonical_json(_Payload(critical, {key: value for key, value in optional.items() if value} or None))


def decode_payload(data: bytes) -> Claims:
    """Raises CorruptError for bytes that are not a payload of cosign's format."""
    payload = decode(data, _Payload)
    if payload.critical.type != TYPE:
        raise CorruptError(
            f"the payload has the type {payload.critical.type[:100]!r}", expected=TYPE, actual=payload.critical.type
        )
    optional = payload.optional or {}
    hex_of(payload.critical.image.docker_manifest_digest)
    name = _claim(optional, NAME, str) or ""
    if not name.isprintable():  # it is displayed, also where no trusted key signed it
        raise CorruptError(f"the payload's {NAME} holds unprintable characters: {name[:100]!r}")
    return Claims(
        digest=payload.critical.image.docker_manifest_digest,
        reference=payload.critical.identity.docker_reference,
        name=name,
        signed=_claim(optional, SIGNED, _Time),
        expires=_claim(optional, EXPIRES, _Time),
    )


_Time = Annotated[datetime, msgspec.Meta(tz=True)]


def _claim(optional: dict[str, Any], key: str, kind: Any) -> Any:
    if key not in optional:
        return None
    try:
        return msgspec.convert(optional[key], kind)
    except msgspec.ValidationError as error:
        raise CorruptError(f"the payload's {key} cannot be read: {error}") from error


def _time_text(time: datetime | None) -> str:
    return "" if time is None else time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


# -- reading ----------------------------------------------------------------------------------------------------------


def read_signatures(read: ReadBlob, descriptor: Descriptor) -> ReadSignatures:
    """The signatures of a signature manifest; nothing of them is verified yet. Raises as `read_layers` does."""
    layers, issues, others, _ = read_layers(read, descriptor, SIGNATURES)
    found: list[SignedPayload] = []
    for layer in layers:
        try:
            found.append(_signature(layer))
        except CorruptError as error:
            issues.append(Issue(message=error.message, where=f"layer {sha256_bytes(layer.data)[:19]}"))
    return ReadSignatures(found, issues, others)


def _signature(layer: Layer) -> SignedPayload:
    annotations = dict(layer.annotations)
    try:
        signature = base64.b64decode(annotations.pop(SIGNATURE, ""), validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptError(f"its annotation {SIGNATURE} is not base64: {error}") from error
    if not signature:
        raise CorruptError(f"it has no annotation {SIGNATURE}")
    return SignedPayload(layer.data, signature, tuple(annotations.items()))


# -- writing ----------------------------------------------------------------------------------------------------------


def sign(store: Store, claims: Claims, key: PrivateKey) -> Descriptor:
    """Sign the bundle `claims.digest`, beside the signatures that it has. Returns the signature manifest.

    An older signature by the same key for the same name is replaced: the newer one says the same, later.

    Raises CorruptError where what stands in the signatures' place is not a signature, StoreError.
    """
    payload = encode_payload(claims)
    new = SignedPayload(payload, key.sign(payload))

    def change(old: Descriptor | None) -> Descriptor:
        there = _there(store, old)
        kept = (one for one in there.signatures if not _replaces(claims, key.public, one))
        return write_attached(store, encode_signatures([*kept, new], there.others, [new], [key.public]))

    return store.change_attachment(signature_tag(claims.digest), change)


def signatures_of(store: Store, digest: str) -> Descriptor | None:
    """The manifest of a bundle's signatures, for a copy of the bundle: its config and layers belong to it."""
    return store.attachment(signature_tag(digest))


def add_signatures(
    store: Store, digest: str, signatures: Sequence[SignedPayload], keys: Sequence[PublicKey] = ()
) -> Descriptor:
    """Put signatures from elsewhere beside those that the bundle has; equal ones once.

    Those that the bundle has and that say of themselves that they have expired go. Where they are too many, those by
    `keys` stay.

    Raises as `sign` does.
    """

    def change(old: Descriptor | None) -> Descriptor:
        there = _there(store, old)
        both = merged(there.signatures, signatures, datetime.now(UTC))
        return write_attached(store, encode_signatures(both, there.others, signatures, keys))

    return store.change_attachment(signature_tag(digest), change)


def fetch_signatures(
    read: ReadBlob, resolve: Resolve, store: Store, digest: str, keys: Sequence[PublicKey] = ()
) -> Descriptor | None:
    """Take a bundle's signatures over from elsewhere, beside those that it has here; None where it has none there.

    `keys` are as in `add_signatures`. Raises CorruptError, NotFoundError, StoreError.
    """
    descriptor = resolve(signature_tag(digest))
    if descriptor is None:
        return None
    return add_signatures(store, digest, read_signatures(read, descriptor).signatures, keys)


def _there(store: Store, descriptor: Descriptor | None) -> ReadSignatures:
    return ReadSignatures([], [], []) if descriptor is None else read_signatures(reader_of(store), descriptor)


def _once(signatures: Iterable[SignedPayload]) -> list[SignedPayload]:
    """Equal ones once, the one whose layer says most."""
    found: dict[tuple[bytes, bytes], SignedPayload] = {}
    for one in signatures:
        same = found.setdefault((one.payload, one.signature), one)
        if len(one.annotations) > len(same.annotations):
            found[one.payload, one.signature] = one
    return list(found.values())


def _replaces(claims: Claims, key: PublicKey, other: SignedPayload) -> bool:
    if not key.verifies(other.signature, other.payload):
        return False
    try:
        old = decode_payload(other.payload)
    except CorruptError:
        return False
    return (old.digest, old.name) == (claims.digest, claims.name)


def merged(there: Sequence[SignedPayload], new: Sequence[SignedPayload], now: datetime) -> list[SignedPayload]:
    """Both, equal ones once, without those `there` that say of themselves that they have expired."""
    return _once([*(one for one in there if not _has_expired(one, now)), *new])


def _has_expired(one: SignedPayload, now: datetime) -> bool:
    try:
        expires = decode_payload(one.payload).expires
    except CorruptError:
        return False
    return expires is not None and expires <= now


def encode_signatures(
    signatures: Sequence[SignedPayload],
    others: Sequence[Descriptor] = (),
    new: Sequence[SignedPayload] = (),
    keys: Sequence[PublicKey] = (),
) -> Encoded:
    """With layers of other types that are there already. Where they are too many, those stay that one of `keys` made,
    then the `new` ones."""
    layers, wanted = [_layer(one) for one in signatures], [_layer(one) for one in new]
    layers = most_wanted_first(layers, wanted, lambda layer: is_signature_by(layer, keys), len(others))
    return encode_layers(SIGNATURES, layers, others)


def is_signature_by(layer: Layer, keys: Sequence[PublicKey]) -> bool:
    """Whether the layer holds a signature that one of `keys` made."""
    try:
        one = _signature(layer)
    except CorruptError:
        return False
    return any(key.verifies(one.signature, one.payload) for key in keys)


def _layer(one: SignedPayload) -> Layer:
    annotations = {**dict(one.annotations), SIGNATURE: base64.b64encode(one.signature).decode()}
    return Layer(one.payload, tuple(sorted(annotations.items())))
