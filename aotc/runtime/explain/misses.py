"""Explains a call: the variant that it runs and why, or why it is a miss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from aotc.errors import Issue, MissError, visible
from aotc.records import Artifact, Signature, TensorLeaf, bucket_name
from aotc.runtime.bind import DoesNotBind, StructureMismatch
from aotc.runtime.explain.dispatch import nearest, obstacles, unexplained
from aotc.runtime.explain.guards import guard_issues, tensor_expected
from aotc.runtime.explain.values import describe
from aotc.runtime.guards import PLAIN_TENSORS, is_followed

if TYPE_CHECKING:
    from aotc.runtime.call import CompiledCall

SHOWN = 3
"""The nearest variants that a miss explains."""
SHOWN_ISSUES = 5
"""Reasons of a miss that a line of the log has."""

FOLLOWED = Issue(
    "it is called within torch.jit.trace, make_fx or another dispatch mode, which cannot look into compiled code",
    hint='call it outside of them, or load with on_miss="eager"',
)


class Explanation(msgspec.Struct, frozen=True):
    """The choice for a call: `kind` is exact, padded, range or miss; `rejected` has the reasons against the others."""

    kind: str
    bucket: str
    pads: tuple[str, ...] = ()
    reasons: tuple[Issue, ...] = ()
    rejected: dict[str, tuple[Issue, ...]] = {}


def explain_call(
    compiled: CompiledCall, args: Sequence[Any], kwargs: Mapping[str, Any], shown: Callable[[Any], str] = describe
) -> Explanation:
    """What this call would run and why; `shown` puts an argument into words.

    Raises TypeError where the arguments do not bind.
    """
    try:
        leaves = compiled._bind(args, kwargs)
    except StructureMismatch as error:
        came = shown(error.came)
        reason = Issue(
            f"`{error.path}` must be {error.expected}, {came} came",
            where=error.path,
            expected=error.expected,
            actual=came,
            hint=error.hint or (_NONE_CAME if error.came is None else _OTHER_ARGUMENTS),
        )
        return Explanation("miss", "", reasons=(reason,))
    except DoesNotBind as error:
        if not compiled._module_takes(args, kwargs):
            raise
        return Explanation("miss", "", reasons=(Issue(f"{error}: it was not built with that", hint=_OTHER_ARGUMENTS),))
    if is_followed():
        return Explanation("miss", "", reasons=(FOLLOWED,))
    dispatcher, signature = compiled._dispatcher, compiled.artifact.signature
    aliases = compiled._guards.state_aliases
    unshaped = [None] * len(signature.leaves)
    if rank_issues := _rank_issues(signature, leaves, shown):
        found = dict.fromkeys([*rank_issues, *guard_issues(compiled._guards, leaves, unshaped, shown)])
        return Explanation("miss", "", reasons=tuple(found))
    sizes = dispatcher.dims.read(leaves)
    if odd := unexplained(dispatcher, sizes, leaves):
        return Explanation("miss", "", reasons=(*odd, *guard_issues(compiled._guards, leaves, unshaped, shown)))
    plan = dispatcher.plan(sizes)
    rejected = {
        bucket_name(compiled.artifact.variants[index].bucket): tuple(obstacles(dispatcher, index, sizes))
        for index in nearest(dispatcher, sizes, SHOWN)
        if plan is None or index != plan.variant
    }
    if plan is None:
        reasons = tuple(guard_issues(compiled._guards, leaves, unshaped, shown))
        if not reasons and not any(rejected.values()):
            reasons = (Issue(f"no bucket takes {dispatcher.dims.named(sizes)}"),)
        return Explanation("miss", "", reasons=reasons, rejected=rejected)
    bucket = bucket_name(compiled.artifact.variants[plan.variant].bucket)
    if not compiled._guards.hold(leaves, plan.shapes) and compiled._in_compiled_layout(leaves, plan) is None:
        reasons = tuple(guard_issues(compiled._guards, leaves, plan.shapes, shown))
        return Explanation("miss", bucket, reasons=reasons, rejected=rejected)
    if aliases is not None and (shared := aliases.issues(leaves, compiled._take_state())):
        return Explanation("miss", bucket, reasons=tuple(shared), rejected=rejected)
    pads = tuple(
        f"{signature.leaves[pad.leaf].path}.shape[{pad.axis}]: {plan.shapes[pad.leaf][pad.axis]} → {pad.size}"  # type: ignore[index]
        for pad in plan.pads
    )
    return Explanation(plan.kind, bucket, pads=pads, rejected=rejected)


def _rank_issues(signature: Signature, leaves: Sequence[Any], shown: Callable[[Any], str]) -> list[Issue]:
    """Why sizes cannot even be compared: arguments that are not tensors, or have another number of axes."""
    found = []
    for value, leaf in zip(leaves, signature.leaves, strict=True):
        if not isinstance(leaf, TensorLeaf):
            continue
        if type(value) not in PLAIN_TENSORS:
            found.append(tensor_expected(value, leaf, shown))
        elif value.is_nested:
            found.append(Issue("a tensor of one shape is expected, a nested one came", where=leaf.path))
        elif value.dim() != len(leaf.shape):
            expected = f"[{', '.join(map(str, leaf.shape))}]"
            found.append(
                Issue(
                    f"shape {expected} is expected, {list(value.shape)} came",
                    where=leaf.path,
                    expected=expected,
                    actual=str(list(value.shape)),
                )
            )
    return found


_NONE_CAME = "pass what the manifest's `inputs` name there; or say `null` there, and build again for None"
_OTHER_ARGUMENTS = (
    "give the call what the manifest's `inputs` name, and no others; or name those there, and build again"
)


def kind_of_miss(explanation: Explanation) -> str:
    """On one line."""
    issues = explanation.reasons or next(iter(explanation.rejected.values()), ())
    texts = [f"{issue.where}: {issue.message}" if issue.where else issue.message for issue in issues[:SHOWN_ISSUES]]
    more = [f"and {len(issues) - SHOWN_ISSUES} more"] if len(issues) > SHOWN_ISSUES else []
    return visible("; ".join([*texts, *more]).replace("\n", " ")) or "unknown"


def miss_error(artifact: Artifact, explanation: Explanation) -> MissError:
    issues = list(explanation.reasons)
    if not explanation.bucket:
        for bucket, reasons in explanation.rejected.items():
            issues += [
                Issue(
                    reason.message,
                    where=f"bucket {bucket}",
                    expected=reason.expected,
                    actual=reason.actual,
                    hint=reason.hint,
                )
                for reason in reasons
            ]
    names = [bucket_name(variant.bucket) for variant in artifact.variants]
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return MissError(
        f"no variant of `{artifact.model}` for {artifact.target} may run this call; its buckets: {listed}",
        issues=tuple(issues),
        hint=(
            "add a bucket to the manifest and rebuild, or " if explanation.rejected and not explanation.bucket else ""
        )
        + 'load with on_miss="eager" to run the module for such calls',
        model=artifact.model,
        buckets=names,
    )
