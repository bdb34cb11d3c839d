"""A miss: the choice for a call, explained, and its error, which has every reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from aotc.call_table.dispatch import Plan
from aotc.call_table.refusals import shape_hint, shape_issue
from aotc.errors import Issue, MissError, visible
from aotc.records import Artifact, Signature, TensorLeaf, bucket_name


def fixed_size_issues(signature: Signature, leaves: Sequence[Any]) -> Iterator[Issue]:
    """Of tensors of the expected ranks: sizes that the manifest has as numbers, beside those of the dims."""
    for value, leaf in zip(leaves, signature.leaves, strict=True):
        if isinstance(leaf, TensorLeaf) and (hint := shape_hint(leaf, value)):
            yield shape_issue(leaf, value, hint)


def pads_told(signature: Signature, plan: Plan) -> tuple[str, ...]:
    """Each axis that is padded, with both sizes."""
    return tuple(
        f"{signature.leaves[pad.leaf].path}.shape[{pad.axis}]: {plan.shapes[pad.leaf][pad.axis]} → {pad.size}"  # type: ignore[index]
        for pad in plan.pads
    )


class Explanation(msgspec.Struct, frozen=True):
    """The choice for a call: `kind` is exact, padded, range or miss; `rejected` has the reasons against the others.

    `for_module` is False for a miss that the module would hardly take either, like one with a tensor of another dtype.
    """

    kind: str
    bucket: str
    pads: tuple[str, ...] = ()
    reasons: tuple[Issue, ...] = ()
    rejected: dict[str, tuple[Issue, ...]] = {}
    for_module: bool = True

    def __str__(self) -> str:
        """The choice, and on lines of their own the padding, the reasons and the other buckets."""
        by_sizes = "by its sizes " if self.kind == "miss" else ""
        lines = [f"{self.kind}: {by_sizes}bucket {self.bucket}" if self.bucket else self.kind]
        lines += [f"  pads {pad}" for pad in self.pads]
        lines += [f"  - {reason}" for reason in self.reasons]
        for bucket, issues in self.rejected.items():
            lines += [f"  - not bucket {bucket}: {issue}" for issue in issues]
            if not issues:
                lines.append(f"  - not bucket {bucket}: it takes these sizes too")
        return visible("\n".join(lines))


def _shared_hint(explanation: Explanation) -> str:
    """The hint that all reasons of several buckets have: it stands once, for the whole call."""
    hints = {reason.hint for reasons in explanation.rejected.values() for reason in reasons}
    several = len(explanation.rejected) > 1 and not explanation.reasons and not explanation.bucket
    return hints.pop() if several and len(hints) == 1 else ""


def _miss_hint(explanation: Explanation, way: str) -> str:
    """Further hints, beside those of the reasons."""
    ways = [hint] if (hint := _shared_hint(explanation)) else []
    if explanation.rejected and not explanation.bucket:
        ways.append("add a bucket to the manifest and rebuild")
    if explanation.for_module and way:
        ways.append(way)
    return ", or ".join(ways)


def error_of(artifact: Artifact, explanation: Explanation, way: str = "") -> MissError:
    """The error of a miss. `way` is one more thing to do about it, where the module would take the call."""
    from aotc.amounts import listed

    issues, shared = list(explanation.reasons), _shared_hint(explanation)
    if not explanation.bucket:
        for bucket, reasons in explanation.rejected.items():
            issues += [
                msgspec.structs.replace(reason, where=f"bucket {bucket}", hint="" if shared else reason.hint)
                for reason in reasons
            ]
    names = [bucket_name(variant.bucket) for variant in artifact.variants]
    return MissError(
        f"no variant of `{artifact.model}` for {artifact.target} may run this call; its buckets: {listed(names, 8)}",
        issues=tuple(issues),
        hint=_miss_hint(explanation, way),
        model=artifact.model,
        buckets=names,
    )
