"""An artifact of which no advisory is, as `aotc.Trust(advisories=…)` asks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from aotc.advisories import own_feed
from aotc.errors import AdvisoryError, Issue
from aotc.store.advisory_feed import UnitHit, artifact_hits, read_feed
from aotc.store.signing.trust import read_trust

if TYPE_CHECKING:
    from aotc.records import Artifact
    from aotc.runtime.find import FoundBundle
    from aotc.runtime.options import LoadOptions
    from aotc.store.layout.bundle import BundleEntry


def check_advisories(options: LoadOptions, found: FoundBundle, entry: BundleEntry, artifact: Artifact) -> None:
    """Raises AdvisoryError where an advisory is of one of the artifact's units, or may be; as `read_feed` does."""
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
