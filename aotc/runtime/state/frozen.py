"""A frozen library holds its weights: a module given beside it is compared with them, and watched for changes."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from aotc.errors import BindError, Issue
from aotc.reads.tensors import dtype_name, named_state, tensor_digests
from aotc.runtime.state.call_state import DENSE_COPY, State, StateRows, TakeState, form_of, lacks_values
from aotc.runtime.state.descriptions import subclass_issues
from aotc.runtime.state.weights import slots_of
from aotc.tensors.subclasses import inner_tensors

if TYPE_CHECKING:
    from aotc.records import Artifact, StateSpec


def watch_frozen(artifact: Artifact, module: nn.Module | None) -> TakeState:
    """The state of a frozen artifact: no tensors. With a module, each call checks that it still has the frozen weights.

    Raises BindError where it never had them, or, at the call that finds it, has them no more.
    """
    nothing = State()
    if module is None:
        return lambda: nothing
    state = named_state(module)
    tensors = [state.get(spec.name) for spec in artifact.state]
    present = {spec.name: tensor for spec, tensor in zip(artifact.state, tensors, strict=True) if tensor is not None}
    digests = tensor_digests({name: tensor for name, tensor in present.items() if not _lack(tensor)})
    issues = [issue for spec in artifact.state for issue in _frozen_issues(spec, present.get(spec.name), digests)]
    if issues:
        raise BindError(
            f"the artifact of `{artifact.model}` holds frozen weights, and the module's are others",
            issues=tuple(issues),
            hint="rebuild it for this checkpoint, or build with `weights: live`",
        )
    if blind := [name for name, tensor in present.items() if tensor.is_inference()]:
        raise BindError(
            f"the weights are inference tensors, whose changes cannot be seen: {', '.join(blind[:5])}",
            hint="build the module outside of torch.inference_mode(), or load the frozen artifact without a module",
        )
    return FrozenWeights(artifact.model, module, present)


class FrozenWeights:
    """Gives the state of a frozen artifact, no tensors. Raises BindError where the module's weights have changed."""

    def __init__(self, model: str, module: nn.Module, present: Mapping[str, Tensor]) -> None:
        self._model, self._present = model, present
        self._slots = slots_of(module, present)
        self._inner = [(name, each) for name, tensor in present.items() for each in inner_tensors(tensor).values()]
        watched = [tensor for _, tensor in self._inner]
        self._stamps, self._forms = list(map(_stamp, watched)), list(map(form_of, watched))
        # They hold the storages, so that no other tensor can come to lie at the same address unnoticed.
        aliases = [tensor.detach() for tensor in watched]
        self._nothing = State()
        self.rows = StateRows(
            self._nothing,
            [(owner, key, tensor) for (owner, key), tensor in zip(self._slots, present.values(), strict=True)],
            [(tensor, writes, place) for tensor, (place, writes) in zip(watched, self._stamps, strict=True)],
            [(tensor, alias.data_ptr(), alias) for tensor, alias in zip(watched, aliases, strict=True)],
        )
        hook = partial(_count_fused_step, {id(tensor) for tensor in present.values()})
        weakref.finalize(
            self, register_optimizer_step_post_hook(hook).remove
        )  # the tensors live, so the ids are theirs

    def __call__(self) -> State:
        replaced = {
            name
            for (owner, key), (name, tensor) in zip(self._slots, self._present.items(), strict=True)
            if owner.get(key) is not tensor
        }
        written = {
            name
            for (name, tensor), stamp, form in zip(self._inner, self._stamps, self._forms, strict=True)
            if _stamp(tensor) != stamp or form_of(tensor) != form
        }
        if names := [name for name in self._present if name in replaced | written]:
            raise BindError(
                f"weights of the module changed after the load: {', '.join(names[:5])}; "
                f"the artifact of `{self._model}` holds the frozen old ones",
                hint="rebuild it for the new weights, or build with `weights: live`",
            )
        return self._nothing


def _count_fused_step(watched: Collection[int], optimizer: Any, args: Any, kwargs: Any) -> None:
    """Let the step of a fused optimizer count in `_version`, which torch leaves as it is."""
    fused = (each for group in optimizer.param_groups if group.get("fused") for each in group["params"])
    increment_version([each for each in fused if id(each) in watched and each.grad is not None])


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Changes with `p.data = …` and with every in-place operator; not with one on `p.data`, which torch hides."""
    return tensor.data_ptr(), tensor._version


def _lack(tensor: Tensor) -> str:
    return next(filter(None, map(lacks_values, inner_tensors(tensor).values())), "")


def _frozen_issues(spec: StateSpec, tensor: Tensor | None, digests: Mapping[str, str]) -> list[Issue]:
    if tensor is None:
        return [Issue("the module has no such tensor", where=spec.name, expected=spec.digest)]
    if lack := _lack(tensor):
        return [Issue(f"a dense tensor was frozen in, the module's is {lack}", where=spec.name, hint=DENSE_COPY)]
    kind = (spec.dtype, spec.shape)
    here = (dtype_name(tensor.dtype), tuple(tensor.shape))
    if kind != here:
        built, now = (f"{dtype} {list(shape)}" for dtype, shape in (kind, here))
        return [Issue(f"built for {built}, the module's is {now}", where=spec.name, expected=built, actual=now)]
    if spec.subclass is not None and (others := subclass_issues(spec.name, spec.subclass, tensor)):
        return others
    if digests[spec.name] == spec.digest:
        return []
    return [
        Issue("is not the tensor that was frozen in", where=spec.name, expected=spec.digest, actual=digests[spec.name])
    ]
