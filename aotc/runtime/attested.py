"""An artifact that may be loaded: `aotc verify` has attested that it is right, and no advisory is of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from aotc.errors import AdvisoryError, Issue, UnverifiedError
from aotc.store.signing.verified import check_verified_there

if TYPE_CHECKING:
    from aotc.records import Artifact, LaunchPick
    from aotc.runtime.find import FoundBundle
    from aotc.runtime.options import LoadOptions
    from aotc.store.advisory_feed import UnitHit
    from aotc.store.layout.bundle import BundleEntry
    from aotc.store.signing.attestations import Attestation


def attested_once(options: LoadOptions, found: FoundBundle, entry: BundleEntry) -> Artifact:
    """The artifact, which is checked as `options.trust` says, once for each bundle that was found."""
    artifact, trust = found.read_artifact(entry), options.trust
    if entry.digest not in found.attested:
        if trust and trust.advisories:
            _check_advisories(options, found, entry, artifact)
        if not trust or trust.needs_attestation(artifact):
            keys = trust.keys if trust else None
            where, bundle = options.place()[1], found.bundle.digest
            artifact = attested(
                artifact,
                lambda: check_verified_there(where, found.store, bundle, entry, options.ref, keys, options.cache),
            )
        found.attested[entry.digest] = artifact
    return found.attested[entry.digest]


def attested(artifact: Artifact, check: Callable[[], Attestation]) -> Artifact:
    """The artifact; one that has never run where it was built is launched as `aotc verify` has measured.

    Raises what `check` raises, which looks for the attestation.
    """
    try:
        launches = check().verification.launches
    except UnverifiedError as error:
        if artifact.untested:
            device = "CPU" if artifact.target.startswith("cpu:") else "GPU"
            error.message = f"{error.message}, and was built on a machine without such a {device}, where it has not run"
            error.hint = f"{error.hint}; or load it with trust=aotc.Trust(allow_untested=True)"
        raise
    if not artifact.untested or len(launches) != len(artifact.variants):
        return artifact
    return _launched(artifact, launches)


def _launched(artifact: Artifact, launches: Sequence[LaunchPick | None]) -> Artifact:
    """All ranks launch alike."""
    pairs = zip(artifact.variants, launches, strict=True)
    variants = tuple(msgspec.structs.replace(variant, launch=launch or variant.launch) for variant, launch in pairs)
    kinds = tuple(_launched(kind, launches) for kind in artifact.kinds)
    return msgspec.structs.replace(artifact, variants=variants, kinds=kinds)


def _check_advisories(options: LoadOptions, found: FoundBundle, entry: BundleEntry, artifact: Artifact) -> None:
    """Raises AdvisoryError where an advisory is of one of the artifact's units, or may be; as `read_feed` does."""
    from aotc.advisories import own_feed
    from aotc.store.advisory_feed import artifact_hits, read_feed
    from aotc.store.signing.trust import read_trust

    assert options.trust is not None
    where = options.trust.advisories
    feed = own_feed() if isinstance(where, bool) else read_feed(os.fspath(where), read_trust(*options.signers))
    if found_hits := list(artifact_hits(found.store, artifact, feed)):
        raise _advised(options.ref, found.bundle.digest, entry.target, found_hits)


def _advised(ref: str, digest: str, target: str, found: list[UnitHit]) -> AdvisoryError:
    ids = tuple(dict.fromkeys(each.hit.advisory.id for each in found))
    return AdvisoryError(
        f"{ref} for {target} was built without {len(ids)} {'patch' if len(ids) == 1 else 'patches'} of torch that its "
        f"graph needs, or may need: {', '.join(ids)}",
        hint=f"build it again: `aotc audit {ref} --rebuild MANIFEST` prints the command; or load it without "
        "aotc.Trust(advisories=…)",
        issues=tuple(map(_issue, found)),
        digest=digest,
        target=target,
        ids=ids,
    )


def _issue(found: UnitHit) -> Issue:
    advisory = found.hit.advisory
    applies = "applies" if found.hit.sure else "may apply, since the unit's graph is not recorded"
    return Issue(f"{advisory.id} ({advisory.concern.effect}) {applies}: {advisory.summary}", where=found.unit)
