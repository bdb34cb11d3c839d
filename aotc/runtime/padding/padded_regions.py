"""Calls of a model by regions whose inputs are padded: the module runs on padded inputs, and its result is cropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from aotc.call_table.bind import DoesNotBind, StructureMismatch, make_binder
from aotc.call_table.dispatch import Dispatcher, Plan
from aotc.errors import LibraryError
from aotc.records import TUPLE, Artifact, bucket_name
from aotc.runtime.conversions.call_forms import have_form
from aotc.runtime.guards import Guards
from aotc.runtime.padding.padded_tensors import apply_crops, apply_pad


class PaddedCalls:
    """The buckets of a model's own calls. A call that none of them takes is not padded: its regions decide."""

    def __init__(self, artifact: Artifact, device: torch.device) -> None:
        whole = msgspec.structs.replace(artifact, variants=artifact.calls, regions=())
        self._parameters, self._calls = artifact.signature.parameters, artifact.calls
        self._bind = make_binder(artifact.signature, any_sequence=True, any_order=True)
        self._dispatcher = Dispatcher(artifact.signature, artifact.calls, artifact.model)
        self._guards = Guards(whole, device, None)

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `function` gives for this call, padded if it has to be."""
        leaves, plan = self._plan(args, kwargs)
        if plan is None:
            return function(*args, **kwargs)
        for pad in plan.pads:
            leaves[pad.leaf] = apply_pad(leaves[pad.leaf], pad)
        grown = {pad.leaf for pad in plan.pads}
        names = {parameter.name: parameter.tree for parameter in self._parameters}
        args = [
            _with_leaves(parameter.tree, value, leaves, grown)
            for parameter, value in zip(self._parameters, args, strict=False)
        ]
        kwargs = {name: _with_leaves(names[name], value, leaves, grown) for name, value in kwargs.items()}
        return self._cropped(function(*args, **kwargs), plan)

    def explain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        """The bucket that a call is padded to, and what grows; nothing for one that is not padded."""
        _, plan = self._plan(args, kwargs)
        if plan is None:
            return "", ()
        from aotc.call_table.misses import pads_told

        return bucket_name(self._calls[plan.variant].bucket), pads_told(self._dispatcher.signature, plan)

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Plan | None]:
        try:
            leaves = self._bind(args, kwargs)
        except (DoesNotBind, StructureMismatch):
            return [], None
        if not have_form(self._guards, leaves):
            return leaves, None
        plan = self._dispatcher.plan(self._dispatcher.dims.read(leaves))
        if plan is None or not plan.pads:
            return leaves, None
        fits = all(leaves[index].shape == plan.shapes[index] for index, *_ in self._guards.tensors)
        return leaves, plan if fits else None

    def _cropped(self, result: Any, plan: Plan) -> Any:
        outputs, structure = pytree.tree_flatten(result)
        if len(outputs) != (count := len(self._calls[plan.variant].outputs)):
            raise LibraryError(
                f"the result of a padded call has {len(outputs)} values, and had {count} at the build: which of them "
                "to crop is unknown",
                hint="call it as the manifest does, or with sizes of a bucket",
            )
        apply_crops(outputs, plan.crops)
        return pytree.tree_unflatten(outputs, structure)


def _with_leaves(tree: Any, value: Any, leaves: Sequence[Any], grown: set[int]) -> Any:
    """The value of an argument with the leaves that have grown; anything else in it is the caller's own object."""
    if isinstance(tree, int):
        return leaves[tree] if tree in grown else value
    if isinstance(tree, list):
        items = tree[1:] if tree[:1] == [TUPLE] else tree
        parts = [_with_leaves(part, item, leaves, grown) for part, item in zip(items, value, strict=True)]
        return parts if isinstance(value, list) else tuple(parts)
    return {name: _with_leaves(tree[name], item, leaves, grown) for name, item in value.items()}
