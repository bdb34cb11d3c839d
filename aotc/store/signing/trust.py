"""Checks the signatures of a bundle before anything of the bundle is used.

A trusted key says by one signature: this digest may be loaded under this name, from this time on, until that one. So a
bundle under another name is refused, and on a host that has loaded a newer one, an older one is too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec

from aotc.digest import canonical_json, sha256_json
from aotc.errors import CorruptError, Issue, SignatureError, StoreError
from aotc.records import decode
from aotc.store.cache_folder import cache_folder
from aotc.store.files.disk import read_limited, typed_errors
from aotc.store.files.store_locks import locked
from aotc.store.files.writing import write_atomically
from aotc.store.layout.bundle import Bundle, read_bundle
from aotc.store.layout.names import hex_of
from aotc.store.readable import ReadableStore
from aotc.store.reference import Reference
from aotc.store.signing.attachments import ReadBlob, Resolve, reader_of
from aotc.store.signing.keys import PathOrText, PublicKey, read_public_keys
from aotc.store.signing.signatures import Claims, SignedPayload, decode_payload, read_signatures, signature_tag

KEYS_VARIABLE = "AOTC_TRUSTED_KEYS"
SINCE_VARIABLE = "AOTC_SIGNED_AFTER"
REQUIRE_VARIABLE = "AOTC_REQUIRE"

CLOCK_SKEW = timedelta(minutes=5)
"""Tolerated difference between the clocks of the signer and of this host."""

MEMORY_VERSION = "trust-v1"
_MEMORY_LIMIT = 1 << 16
_LOCK_TIMEOUT = 60.0  # seconds; the lock is held for a few milliseconds

_log = logging.getLogger("aotc")


class TrustedKeys(NamedTuple):
    """The trusted keys, the earliest time to accept, the folder of accepted signatures (None: nothing is kept), and
    what `AOTC_REQUIRE` asks of a fetch (`aotc.store.signing.build_statements`)."""

    keys: tuple[PublicKey, ...]
    signed_after: datetime | None = None
    memory: Path | None = None
    required: str = ""


def read_trust(
    trusted_keys: Sequence[PathOrText] | PathOrText | None = None,
    signed_after: datetime | str | None = None,
    cache: PathOrText | None = None,
) -> TrustedKeys | None:
    """What the caller asks for, else `$AOTC_TRUSTED_KEYS` and `$AOTC_SIGNED_AFTER`; None where no keys are set.

    Raises SignatureError for keys that cannot be used, for a bad time, and for a time without keys; StoreError.
    """
    if isinstance(trusted_keys, str | os.PathLike):
        trusted_keys = [trusted_keys]
    since = _time(signed_after or os.environ.get(SINCE_VARIABLE) or None)
    required = os.environ.get(REQUIRE_VARIABLE, "")
    if trusted_keys is None and KEYS_VARIABLE in os.environ:
        try:
            named = read_public_keys([part for part in os.environ[KEYS_VARIABLE].split(os.pathsep) if part])
        except StoreError as error:  # SignatureError is one
            error.message = f"{KEYS_VARIABLE}: {error.message}"
            raise
        return TrustedKeys(named, since, _memory_folder(cache), required)
    if trusted_keys is None:
        if required:
            raise SignatureError(
                f"{REQUIRE_VARIABLE} asks for {required}, and no trusted keys are set",
                hint=f"give aotc.Trust(keys=…), or set {KEYS_VARIABLE}",
            )
        if since is not None:
            raise SignatureError(
                f"bundles signed after {since} were asked for, and no trusted keys are set",
                hint=f"give aotc.Trust(keys=…), or set {KEYS_VARIABLE}",
            )
        return None
    return TrustedKeys(read_public_keys(trusted_keys), since, _memory_folder(cache), required)


def _time(value: datetime | str | None) -> datetime | None:
    try:
        time = msgspec.convert(value, datetime | None)
    except msgspec.ValidationError as error:
        raise SignatureError(f"{value!r} is not a time: {error}", hint="write it like 2026-01-31T00:00:00Z") from error
    return time.replace(tzinfo=UTC) if time is not None and time.tzinfo is None else time


def _memory_folder(cache: PathOrText | None) -> Path | None:
    try:
        return (Path(cache) if cache else cache_folder()).absolute() / MEMORY_VERSION
    except StoreError as error:
        _warn_forgetful(error)
        return None


# -- checking ---------------------------------------------------------------------------------------------------------


def read_trusted(store: ReadableStore, reference: Reference, trust: TrustedKeys | None) -> Bundle:
    """The bundle that `reference` names, if a trusted key signed it for that name; any, where `trust` is None.

    All that is read later is named by a digest in the bundle, or below it. Raises as `read_bundle` and
    `check_signatures` do.
    """
    bundle = read_bundle(store, reference)
    _check(store, bundle, reference, trust)
    return bundle


def check_bundle(
    store: ReadableStore,
    bundle: Bundle,
    reference: Reference,
    trusted_keys: Sequence[PathOrText] | PathOrText | None = None,
    signed_after: datetime | str | None = None,
    cache: PathOrText | None = None,
) -> None:
    """Whether a trusted key signed the bundle for that reference, where keys are given or set. Raises as `read_trust`
    and `check_signatures` do."""
    _check(store, bundle, reference, read_trust(trusted_keys, signed_after, cache))


def _check(store: ReadableStore, bundle: Bundle, reference: Reference, trust: TrustedKeys | None) -> None:
    if trust is not None:
        check_signatures(reader_of(store), store.attachment, bundle.digest, reference, trust)


class Signer(NamedTuple):
    """A signature that a trusted key made, and what it claims."""

    key: PublicKey
    claims: Claims


def check_signatures(
    read: ReadBlob,
    resolve: Resolve,
    digest: str,
    reference: Reference,
    trust: TrustedKeys,
    now: datetime | None = None,
    *,
    remember: bool = True,
) -> Signer:
    """Whether the bundle `digest` may be loaded as `reference`. Of several good signatures the newest is returned.

    `read` gives bytes by their digest; `resolve` gives the manifest that a tag names. So it works over any store.

    For `model:tag` a trusted key must have signed this digest for this very name, at a time that is not in the
    future, not before `trust.signed_after`, and not before what this host has accepted for that name from any of the
    trusted keys. For `model@sha256:…` the digest pins the bundle, so neither the name nor that memory matters.
    Without `remember`, an acceptance leaves no trace.

    Raises SignatureError; CorruptError, NotFoundError and StoreError where signatures cannot be read.
    """
    now = now or datetime.now(UTC)
    descriptor = resolve(signature_tag(digest))
    if descriptor is None:
        raise _unsigned(digest, reference, trust)
    signatures, issues, _ = read_signatures(read, descriptor)
    good: list[Signer] = []
    flaws: list[_Flaw] = []
    for one in signatures:
        signer = _signer(one, trust.keys)
        if isinstance(signer, _Flaw):
            flaws.append(signer)
        elif flaw := _flaw(signer.claims, digest, reference, trust, now):
            flaws.append(flaw)
        else:
            good.append(signer)
    if not good:
        raise _refused(digest, reference, flaws, issues, trust)
    newest = max(good, key=lambda signer: signer.claims.signed or datetime.min.replace(tzinfo=UTC))
    if reference.tag is not None and trust.memory is not None:
        _refuse_rollback(newest, digest, reference, trust, remember)
    return newest


class _Flaw(NamedTuple):
    """Why a signature does not do. The later in `REASONS`, the nearer it came, and the more it says."""

    reason: str
    expected: str
    actual: str
    hint: str = ""


REASONS = ("untrusted", "malformed", "other-bundle", "other-name", "too-old", "not-yet-valid", "expired")


def _signer(one: SignedPayload, keys: Sequence[PublicKey]) -> Signer | _Flaw:
    key = next((key for key in keys if key.verifies(one.signature, one.payload)), None)
    if key is None:
        return _Flaw(
            "untrusted",
            f"a signature by {_fingerprints(keys)}",
            "one by another key, or of other bytes",
            "trust the key that signed it, or sign it with a trusted one: aotc sign REF --key KEY",
        )
    try:
        return Signer(key, decode_payload(one.payload))
    except CorruptError as error:
        return _Flaw("malformed", "a payload of cosign's format", error.message, "sign the bundle again")


def _flaw(claims: Claims, digest: str, reference: Reference, trust: TrustedKeys, now: datetime) -> _Flaw | None:
    if claims.digest != digest:
        hint = "the signature was moved to another bundle: find out who writes to the store"
        return _Flaw("other-bundle", f"a signature of {digest}", f"one of {claims.digest}", hint)
    if claims.expires is not None and claims.expires <= now - CLOCK_SKEW:
        return _Flaw("expired", f"valid at {_text(now)}", f"valid until {_text(claims.expires)}", "sign it again")
    if claims.signed is not None and claims.signed > now + CLOCK_SKEW:
        hint = "the clock of this host is slow, or that of the signer was fast: set it, and sign again"
        return _Flaw("not-yet-valid", f"signed before {_text(now)}", f"signed at {_text(claims.signed)}", hint)
    if trust.signed_after is not None and (claims.signed is None or claims.signed < trust.signed_after):
        expected = f"signed at or after {_text(trust.signed_after)}"
        return _Flaw("too-old", expected, f"signed at {_text(claims.signed)}", "load a newer bundle, or sign it again")
    if reference.tag is None:
        return None
    names = signed_names(reference.store, reference.model, reference.tag)
    if claims.name not in names or claims.signed is None:
        return _Flaw(
            "other-name",
            f"signed for {' or '.join(names)}, with a time",
            f"signed for {claims.name[:300] or 'no name'} at {_text(claims.signed)}",
            f"sign it for that name, or load it by its digest: @{digest}; with cosign add -a dev.aotc.name=… and "
            "-a dev.aotc.signed=…",
        )
    return None


def signed_names(store: str | None, model: str, tag: str) -> tuple[str, ...]:
    """The name that a signature must be for: `model:tag`, in any store.

    In a registry the repository stands for the model: `host/team/tiny:tag`, or its last part alone, `tiny:tag`.
    """
    if model:
        return (f"{model}:{tag}",)
    repository = (store or "").partition("://")[2]
    return (f"{repository}:{tag}", f"{repository.rpartition('/')[2]}:{tag}")


def _unsigned(digest: str, reference: Reference, trust: TrustedKeys) -> SignatureError:
    return SignatureError(
        f"{reference.name} ({digest}) is not signed; trusted are {_fingerprints(trust.keys)}",
        hint=f"sign it: aotc sign {reference.name} --key KEY; or copy {signature_tag(digest)} along with the bundle",
        digest=digest,
        expected=f"a signature by {_fingerprints(trust.keys)}",
        actual="no signature",
        reason="unsigned",
    )


def _refused(
    digest: str, reference: Reference, flaws: Sequence[_Flaw], issues: Sequence[Issue], trust: TrustedKeys
) -> SignatureError:
    """The message is of the signature that came nearest; several are listed, each with its finding."""
    nearest = max(
        flaws,
        key=lambda flaw: REASONS.index(flaw.reason),
        default=_Flaw("malformed", f"a signature by {_fingerprints(trust.keys)}", f"{len(issues)} other layers"),
    )
    alone = len(flaws) == 1 and not issues  # the message says all of it
    found = [
        Issue(message=f"{flaw.reason}: {flaw.actual}", expected=flaw.expected, actual=flaw.actual, hint=flaw.hint)
        for flaw in flaws
    ]
    return SignatureError(
        f"{reference.name} ({digest}) is refused: expected {nearest.expected}; found {nearest.actual}",
        issues=() if alone else (*found, *issues),
        hint=nearest.hint if alone else "",
        digest=digest,
        expected=nearest.expected,
        actual=nearest.actual,
        reason=nearest.reason,
    )


def _fingerprints(keys: Sequence[PublicKey]) -> str:
    return ", ".join(key.fingerprint[:23] for key in keys)


def _text(time: datetime | None) -> str:
    return "an unknown time" if time is None else time.astimezone(UTC).isoformat().replace("+00:00", "Z")


# -- remembering ------------------------------------------------------------------------------------------------------


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest signature by one key for one name that this host has accepted.

    folder/                     AOTC_CACHE_DIR
    └── trust-v1/
        ├── <64 hex>.json       an `Accepted`, named by the sha256 of [key, name]
        └── lock
    """

    key: str
    name: str
    digest: str
    signed: datetime


def _refuse_rollback(signer: Signer, digest: str, reference: Reference, trust: TrustedKeys, remember: bool) -> None:
    """Compare with what was accepted from any trusted key: an old bundle does not come back by an old key, nor by an
    old signature for the shorter of a repository's names, which other repositories have, too.

    Where nothing can be remembered, that is said on the logger `aotc`, and the bundle is taken.
    """
    folder, claims = trust.memory, signer.claims
    assert folder is not None and claims.signed is not None
    assert reference.tag is not None
    full, *_ = signed_names(reference.store, reference.model, reference.tag)
    try:
        known = {
            (name, key.fingerprint): one
            for name in (claims.name, full)
            for key in trust.keys
            if (one := _recall(_memory_path(folder, key.fingerprint, name))) is not None
        }
        if newer := [one for one in known.values() if claims.signed < one.signed]:
            raise _rolled_back(newer, claims, digest, reference, folder)
        for name in dict.fromkeys((claims.name, full)) if remember else ():
            mine = known.get((name, signer.key.fingerprint))
            if mine is None or mine.signed < claims.signed:
                _remember(folder, Accepted(signer.key.fingerprint, name, digest, claims.signed))
    except StoreError as error:
        if "errno" not in error.fields:
            raise
        _warn_forgetful(error)


def _rolled_back(
    newer: Sequence[Accepted], claims: Claims, digest: str, reference: Reference, folder: Path
) -> SignatureError:
    newest = max(newer, key=lambda one: one.signed)
    return SignatureError(
        f"{reference.name} ({digest}) was signed at {_text(claims.signed)}; this host has already accepted "
        f"{newest.digest}, signed at {_text(newest.signed)}",
        hint="to go back on purpose, sign the older bundle again, or forget the newer signature: remove "
        + " and ".join(str(_memory_path(folder, one.key, one.name)) for one in newer),
        digest=digest,
        expected=f"signed at or after {_text(newest.signed)}",
        actual=f"signed at {_text(claims.signed)}",
        reason="rolled-back",
    )


def _memory_path(folder: Path, key: str, name: str) -> Path:
    return folder / f"{hex_of(sha256_json([key, name]))}.json"


def _recall(path: Path) -> Accepted | None:
    with typed_errors("read", path):
        try:
            data = read_limited(path, _MEMORY_LIMIT)
        except FileNotFoundError:
            return None
    try:
        return decode(data, Accepted)
    except CorruptError as error:
        raise CorruptError(
            f"{path} cannot be read, so a rollback could not be detected: {error.__cause__}",
            hint="remove it; what this host has accepted is forgotten then",
            path=str(path),
            expected="the newest accepted signature",
            actual="other bytes",
        ) from error


def _remember(folder: Path, accepted: Accepted) -> None:
    path = _memory_path(folder, accepted.key, accepted.name)
    with locked(folder / "lock", _LOCK_TIMEOUT):
        known = _recall(path)  # another process may have accepted a newer one meanwhile
        if known is None or known.signed < accepted.signed:
            write_atomically(path, canonical_json(accepted))


def _warn_forgetful(error: StoreError) -> None:
    _log.warning(
        "what was accepted cannot be remembered, so an older signed bundle would be accepted too: %s", error.message
    )


# -- looking ----------------------------------------------------------------------------------------------------------


class SeenSignature(msgspec.Struct, frozen=True):
    """What `aotc inspect` shows of a signature. Without `key` no trusted key made it: its claims may be lies."""

    claims: Claims | None
    key: str = ""
    flaw: str = ""


def look_at_signatures(
    read: ReadBlob, resolve: Resolve, digest: str, reference: Reference, trust: TrustedKeys | None
) -> list[SeenSignature]:
    """Every signature of a bundle, trusted or not; nothing is refused or remembered. Raises StoreError."""
    descriptor = resolve(signature_tag(digest))
    if descriptor is None:
        return []
    return [_look(one, digest, reference, trust) for one in read_signatures(read, descriptor).signatures]


def _look(one: SignedPayload, digest: str, reference: Reference, trust: TrustedKeys | None) -> SeenSignature:
    signer = _signer(one, trust.keys if trust else ())
    if isinstance(signer, Signer):
        assert trust is not None
        flaw = _flaw(signer.claims, digest, reference, trust, datetime.now(UTC))
        return SeenSignature(signer.claims, signer.key.fingerprint, flaw.reason if flaw else "")
    try:
        return SeenSignature(decode_payload(one.payload), flaw=signer.reason)
    except CorruptError:
        return SeenSignature(None, flaw="malformed")
