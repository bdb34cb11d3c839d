"""An artifact that may be loaded since `aotc verify` has attested that it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from aotc.errors import UnverifiedError
from aotc.records import Artifact, LaunchPick
from aotc.store.signing.attestations import Attestation
from aotc.store.signing.verified import check_verified_there

if TYPE_CHECKING:
    from aotc.runtime.load import Found, Request
    from aotc.store.layout.bundle import BundleEntry


def attested_once(asked: Request, found: Found, entry: BundleEntry) -> Artifact:
    """The artifact, whose attestation is checked, once for each bundle that was found."""
    artifact, keys = found.read_artifact(entry), asked.trust.keys if asked.trust else None
    if entry.digest not in found.attested:
        which = (asked.place()[1], found.store, found.bundle.digest, entry, asked.ref, keys, asked.cache)
        found.attested[entry.digest] = attested(artifact, lambda: check_verified_there(*which))
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
