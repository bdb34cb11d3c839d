"""Whether an artifact has passed `aotc verify`, by the attestations of its bundle."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Any

from aotc.errors import Issue, UnverifiedError
from aotc.store.layout.bundle import BundleEntry
from aotc.store.readable import ReadableStore
from aotc.store.reference import is_remote
from aotc.store.signing.attachments import reader_of
from aotc.store.signing.attestations import Attestation, read_attestations
from aotc.store.signing.keys import PathOrText
from aotc.store.signing.trust import TrustedKeys, read_trust
from aotc.verification import Verification


def check_verified(
    store: ReadableStore, bundle: str, entry: BundleEntry, name: str, trust: TrustedKeys | None = None
) -> Attestation:
    """The attestation that counts of one artifact of the bundle with the digest `bundle`, if the artifact has passed.

    The newest counts, with one exception: a pass of `aotc verify` without a gate does not undo a gate's refusal. With
    `trust`, only attestations that a trusted key signed count. `name` is the reference, for messages. Raises
    UnverifiedError; SignatureError, CorruptError, NotFoundError and StoreError where they cannot be read.
    """
    found, issues = read_attestations(reader_of(store), store.attachment, bundle, trust.keys if trust else ())
    ours = [one for one in found if one.verification.artifact == entry.digest]
    counting = [one for one in ours if one.signers] if trust else ours
    about = f"{name} for {entry.target}"
    fields: dict[str, Any] = {"digest": bundle, "target": entry.target}
    attesting = f"`aotc verify {name} --attest{' --key KEY' if trust else ''}` on a machine that runs {entry.target}"
    if not counting and trust and ours:
        raise UnverifiedError(
            f"{about}: no attestation is signed by a trusted key, of {len(ours)}",
            hint=f"trust the key that signed it, or run {attesting}",
            expected=f"a signature by {', '.join(key.fingerprint[:23] for key in trust.keys)}",
            actual=_keyids(ours),
            reason="untrusted",
            **fields,
        )
    if not counting:
        raise UnverifiedError(
            f"{about} has no attestation of `aotc verify`",
            hint=f"run {attesting}",
            issues=tuple(issues),
            expected="an attestation of this artifact",
            actual=_of_others(found),
            reason="unverified",
            **fields,
        )
    decisive = that_counts([one.verification for one in counting])
    if not decisive.passed:
        raise _failed(decisive, about, fields, name, attesting)
    return next(one for one in counting if one.verification is decisive)


def verified_in(store: ReadableStore, bundle: str, trust: TrustedKeys | None = None) -> dict[str, Verification]:
    """The verification that counts of each artifact of a bundle that has one, by the artifact's digest.

    Raises SignatureError, CorruptError, NotFoundError and StoreError where they cannot be read.
    """
    found, _ = read_attestations(reader_of(store), store.attachment, bundle, trust.keys if trust else ())
    by_artifact: dict[str, list[Verification]] = {}
    for one in found:
        if one.signers or not trust:
            by_artifact.setdefault(one.verification.artifact, []).append(one.verification)
    return {artifact: that_counts(each) for artifact, each in by_artifact.items()}


def that_counts(verifications: Sequence[Verification]) -> Verification:
    """Of the verifications of one artifact, the newest first: the newest, or the newest with a gate's limits where only
    that one says that the artifact did not pass."""
    newest = verifications[0]
    gated = next((one for one in verifications if one.limits), newest)
    return newest if not newest.passed else gated


def check_verified_there(
    where: str,
    local: ReadableStore,
    bundle: str,
    entry: BundleEntry,
    name: str,
    trusted_keys: Sequence[PathOrText] | PathOrText | None = None,
    cache: PathOrText | None = None,
) -> Attestation:
    """`check_verified` with the keys that are given or set; of a remote `where`, by the attestations that are there.

    Raises as `read_trust` does, too.
    """
    from aotc.store.opening import open_readable

    store = open_readable(where) if is_remote(where) else local
    return check_verified(store, bundle, entry, name, read_trust(trusted_keys, cache=cache))


def _failed(
    verification: Verification, about: str, fields: dict[str, Any], name: str, attesting: str
) -> UnverifiedError:
    limits = [
        Issue(
            f"{one.name} is {one.found}, the limit is {one.limit}"
            if one.measured
            else f"{one.name} could not be measured: {one.found}, the limit is {one.limit}",
            expected=one.limit,
            actual=one.found,
        )
        for one in verification.limits
        if not one.passed
    ]
    if verification.limits:  # without the gate, the new attestation would not count
        attesting = attesting.replace(f"aotc verify {name}", f"aotc verify {name} --gate FILE")
    return UnverifiedError(
        f"{about} did not pass `aotc verify` at {verification.created.astimezone(UTC):%FT%TZ}",
        hint=f"build it again; or, if it is right, run {attesting}",
        issues=(*verification.issues, *limits),
        expected="a verification that passed",
        actual="the newest one with limits of a gate failed" if verification.limits else "the newest one failed",
        reason="failed",
        **fields,
    )


def _keyids(found: Sequence[Attestation]) -> str:
    keys = sorted({key[:23] for one in found for key in one.keyids if key})
    return f"signed by {', '.join(keys)}" if keys else "unsigned"


def _of_others(found: Sequence[Attestation]) -> str:
    targets = sorted({one.verification.target for one in found})
    return f"attestations for {', '.join(targets)}" if targets else "no attestation"
