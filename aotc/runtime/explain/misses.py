"""Explains a call: the variant that it runs and why, or why it is a miss."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.autograd import forward_ad

from aotc.call_table.bind import DoesNotBind, StructureMismatch
from aotc.call_table.misses import Explanation, error_of, fixed_size_issues, pads_told
from aotc.call_table.obstacles import nearest, obstacles, unexplained
from aotc.call_table.refusals import shape_issue
from aotc.call_table.values import describe, describe_form
from aotc.errors import BindError, Issue, MissError, visible
from aotc.reads.attributes import own_forward
from aotc.reads.tensors import dtype_name
from aotc.records import Signature, TensorLeaf, bucket_name
from aotc.runtime.conversions.call_forms import form_of, in_compiled_layout
from aotc.runtime.guards import (
    PLAIN_TENSORS,
    is_followed,
    no_sizes,
    tangent_issues,
    transform,
)
from aotc.runtime.state.weights import ModuleState
from aotc.runtime.stats import count_miss

if TYPE_CHECKING:
    from aotc.runtime.call import CompiledCall

_log = logging.getLogger("aotc")

SHOWN = 3
"""The nearest variants that a miss explains."""
SHOWN_ISSUES = 5
"""Reasons of a miss, and tensors of its call, that a line of the log has."""

FOLLOWED = Issue(
    "it is called within torch.jit.trace, make_fx or another dispatch mode, which cannot look into compiled code",
    hint='call it outside of them, or load with on_miss="eager", which records the module',
)

TRANSFORMED = Issue(
    "it is called within torch.compile or within a transform of torch.func, which cannot look into compiled code",
    hint="call it outside of them; a model for torch.compile that holds it takes torch.compiler.disable(compiled)",
)


def answer_miss(
    call: CompiledCall, args: Sequence[Any], kwargs: Mapping[str, Any], form: object, leaves: Sequence[Any]
) -> Any:
    """Count a miss, and do what `on_miss` says. `form` and that of the leaves tell kinds of misses apart: the cause is
    only worked out for an error or a log message."""

    def kind() -> str:
        return kind_of_miss(explain_call(call, args, kwargs, describe_form))

    if text := count_miss(call._counters, (form, form_of(call._guards, leaves)), kind):
        tensors = tensors_of_call(call, args, kwargs)
        given = f"; in this call {tensors}" if tensors else ""
        _log.warning("%s: a call that no variant may run: %s%s", call.artifact.model, text, given)
    if call.on_miss == "eager":
        return _run_eager(call, args, kwargs)
    # No frame here may hold the error: its traceback holds the frames, and they hold the model and the inputs.
    if callable(call.on_miss):
        return call.on_miss(miss_error(call, explain_call(call, args, kwargs)), *args, **kwargs)
    raise miss_error(call, explain_call(call, args, kwargs))


def _run_eager(call: CompiledCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    run = call._eager or call._run_module
    if not isinstance(call._state, ModuleState):
        return run(*args, **kwargs)
    if call._streams:
        call._streams.note()
    return call._state.run_eagerly(lambda: run(*args, **kwargs))


def module_takes(call: CompiledCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether arguments that were not built for bind to the module's forward, as others of its `**kwargs` do."""
    if call.module is None:
        return False
    try:
        inspect.signature(own_forward(call.module, call.artifact.method)).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def explain_call(
    compiled: CompiledCall, args: Sequence[Any], kwargs: Mapping[str, Any], shown: Callable[[Any], str] = describe
) -> Explanation:
    """The bucket that this call would run, and why; `shown` puts an argument into words.

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
        if not module_takes(compiled, args, kwargs):
            raise
        return Explanation("miss", "", reasons=(Issue(f"{error}: it was not built with that", hint=_OTHER_ARGUMENTS),))
    if is_followed():
        return Explanation("miss", "", reasons=(FOLLOWED,), for_module=False)
    if transform() is not None:
        return Explanation("miss", "", reasons=(TRANSFORMED,), for_module=False)
    explanation = _explain_leaves(compiled, leaves, shown)
    if explanation.kind != "miss" or _has_tensors_of_build(compiled, leaves):
        return explanation
    return msgspec.structs.replace(
        explanation, reasons=_with_changed_module(compiled, leaves, explanation.reasons), for_module=False
    )


def _explain_leaves(compiled: CompiledCall, leaves: list[Any], shown: Callable[[Any], str]) -> Explanation:
    dispatcher, signature = compiled._dispatcher, compiled.artifact.signature
    aliases = compiled._guards.state_aliases
    unshaped = [None] * len(signature.leaves)
    if rank_issues := _rank_issues(signature, leaves, shown):
        found = dict.fromkeys([*rank_issues, *compiled._guards.issues(leaves, unshaped, shown)])
        return Explanation("miss", "", reasons=tuple(found))
    sizes = dispatcher.dims.read(leaves)
    if odd := unexplained(dispatcher, sizes, leaves):
        return Explanation("miss", "", reasons=(*odd, *compiled._guards.issues(leaves, unshaped, shown)))
    plan = dispatcher.plan(sizes)
    rejected = {
        bucket_name(compiled.artifact.variants[index].bucket): tuple(obstacles(dispatcher, index, sizes))
        for index in nearest(dispatcher, sizes, SHOWN)
        if plan is None or index != plan.variant
    }
    if plan is None:
        reasons = (*fixed_size_issues(signature, leaves), *compiled._guards.issues(leaves, unshaped, shown))
        if not reasons and not any(rejected.values()):
            reasons = (Issue(f"no bucket takes {dispatcher.dims.named(sizes)}"),)
        return Explanation("miss", "", reasons=reasons, rejected=rejected)
    bucket = bucket_name(compiled.artifact.variants[plan.variant].bucket)
    if (
        not compiled._guards.hold(leaves, plan.shapes)
        and in_compiled_layout(compiled._guards, leaves, plan.shapes) is None
    ):
        reasons = tuple(compiled._guards.issues(leaves, plan.shapes, shown))
        return Explanation("miss", bucket, reasons=reasons, rejected=rejected)
    if aliases is not None and (shared := aliases.issues(leaves, compiled._take_state())):
        return Explanation("miss", bucket, reasons=tuple(shared), rejected=rejected)
    if forward_ad._current_level >= 0:
        state = ((spec.name, each) for spec, each in zip(compiled.artifact.state, compiled._take_state(), strict=False))
        if tangents := tangent_issues(state):
            return Explanation("miss", bucket, reasons=tuple(tangents), rejected=rejected)
    return Explanation(plan.kind, bucket, pads=pads_told(signature, plan), rejected=rejected)


def _has_tensors_of_build(compiled: CompiledCall, leaves: Sequence[Any]) -> bool:
    """Whether the arguments are tensors of the dtypes, ranks, fixed sizes and device of the build."""
    return all(
        type(value) in PLAIN_TENSORS
        and not value.is_nested
        and value.dtype is dtype
        and value.device == compiled.device
        and value.layout is torch.strided
        and len(leaf.shape) == value.dim()
        and all(type(size) is not int or size == here for size, here in zip(leaf.shape, value.shape, strict=True))
        for index, leaf, dtype, _ in compiled._guards.tensors
        for value in [leaves[index]]
    )


def _with_changed_module(compiled: CompiledCall, leaves: Sequence[Any], reasons: Sequence[Issue]) -> tuple[Issue, ...]:
    """Where inputs of another dtype or device come to a module that was itself cast or moved after the load, that is
    the reason: converted inputs would not help."""
    tensors = [(leaves[index], dtype) for index, _, dtype, _ in compiled._guards.tensors]
    if any(
        isinstance(value, torch.Tensor) and (value.dtype is not dtype or value.device != compiled.device)
        for value, dtype in tensors
    ):
        try:
            compiled._state.take()
        except BindError as error:
            first, *others = error.issues or (Issue(error.message),)
            more = f", and {len(others)} more of its tensors are not those of the build" if others else ""
            changed = Issue(
                f"changed after the load: {first.message}{more}",
                where=f"module.{first.where}" if first.where else "module",
                expected=first.expected,
                actual=first.actual,
                hint=error.hint,
            )
            return (changed, *(msgspec.structs.replace(reason, hint="") for reason in reasons))
    return tuple(reasons)


def _rank_issues(signature: Signature, leaves: Sequence[Any], shown: Callable[[Any], str]) -> list[Issue]:
    """Why sizes cannot even be compared: arguments that are not tensors, or have another number of axes."""
    found = []
    for value, leaf in zip(leaves, signature.leaves, strict=True):
        if not isinstance(leaf, TensorLeaf) or (value is None and leaf.default is not None):
            continue  # a default has the sizes of other tensors, of which one is wrong
        if without_sizes := no_sizes(value, leaf, shown):
            found.append(without_sizes)
        elif value.dim() != len(leaf.shape):
            found.append(shape_issue(leaf, value))
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


def tensors_of_call(compiled: CompiledCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The dtypes and shapes of a call's tensors, on one line: `x is float32 [3, 256]`. "" without any, where the
    arguments do not bind, and where reading a shape would itself be recorded."""
    if is_followed() or transform() is not None:
        return ""
    try:
        leaves = compiled._bind(args, kwargs)
    except (DoesNotBind, StructureMismatch):
        return ""
    texts = [
        f"{leaf.path} is {dtype_name(value.dtype)} {'nested' if value.is_nested else list(value.shape)}"
        for leaf, value in zip(compiled.artifact.signature.leaves, leaves, strict=True)
        if type(value) in PLAIN_TENSORS
    ]
    more = [f"and {len(texts) - SHOWN_ISSUES} more"] if len(texts) > SHOWN_ISSUES else []
    return visible(", ".join([*texts[:SHOWN_ISSUES], *more]))


def miss_error(compiled: CompiledCall, explanation: Explanation) -> MissError:
    load = "load with" if compiled.module is not None else "load it with the module and"
    return error_of(compiled.artifact, explanation, f'{load} on_miss="eager" to run the module for such calls')
