"""The result of `aotc verify` for one artifact on one machine: the predicate of an attestation, see FORMAT.md."""

from datetime import datetime
from typing import Annotated, Literal

import msgspec

from aotc.errors import Issue
from aotc.records import Environment, LaunchPick, Record

ISSUES_LIMIT = 50
"""Issues that one verification names; a model whose every bucket is wrong needs no longer list."""


class Limit(Record, frozen=True):
    """A limit of a gate, what was found, both as texts with their units, and whether the limit is kept.

    measured: False where nothing was compared with the limit. Then `passed` says whether that is in order: there is
        nothing to compare a first release with; but what could not be measured has not passed.
    """

    name: str
    limit: str
    found: str
    passed: bool
    measured: bool = True

    @property
    def verdict(self) -> Literal["kept", "not kept", "unmeasured", "-"]:
        """`-` where there is nothing to compare with."""
        if self.measured:
            return "kept" if self.passed else "not kept"
        return "-" if self.passed else "unmeasured"


class Verification(Record, frozen=True):
    """`artifact` is the digest of the artifact's manifest, so one of the bundle's entries.

    passed: no comparison failed, crashed or could not run, and every limit is kept.
    created: when the comparison ended (RFC 3339, UTC). Of several of one artifact, the newest counts;
        a newer one without limits does not undo limits that were not kept.
    environment: the machine on which the artifact was run; `environment.gpu` is the GPU's name.
    compared: how many calls were compared with eager, over all `buckets` (their names), sizes and kinds of weights.
    issues: of the comparisons that did not pass, the first ones.
    launches: of an artifact that had not run before, how each variant is launched, as measured, in their order; None
        where that is not a matter of time.
    """

    model: str
    target: str
    artifact: str
    passed: bool
    created: Annotated[datetime, msgspec.Meta(tz=True)]
    aotc: str
    environment: Environment
    compared: int = 0
    buckets: tuple[str, ...] = ()
    issues: tuple[Issue, ...] = ()
    limits: tuple[Limit, ...] = ()
    launches: tuple[LaunchPick | None, ...] = ()

    @property
    def verdict(self) -> Literal["passed", "failed", "unmeasured"]:
        """`unmeasured` if the only problem is a limit that could not be measured."""
        if self.passed:
            return "passed"
        verdicts = {one.verdict for one in self.limits}
        return "failed" if self.issues or "unmeasured" not in verdicts or "not kept" in verdicts else "unmeasured"
