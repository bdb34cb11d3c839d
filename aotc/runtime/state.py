"""The module's own tensors as arguments of a library.

A live library holds no weights: every parameter and buffer is an argument of each call. So an in-place change is seen
at once, a tensor put in a parameter's place is noticed at the next call and checked before it is used, and nothing can
be half old and half new. A frozen library holds its weights; a module that is given beside it is watched for changes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from aotc.errors import BindError, Issue
from aotc.records import Artifact, StateSpec
from aotc.snapshot import dtype_name, named_state, tensor_digests

TakeState = Callable[[], list[Tensor]]

_data_ptr = cast("Callable[[Any], int]", torch.Tensor.data_ptr)


def bind_state(artifact: Artifact, module: nn.Module | None, device: torch.device) -> TakeState:
    """A function that gives the module's current tensors in the order of `artifact.state`, checked.

    Raises BindError, here or at the later call that finds a replaced tensor, with every mismatch at once.
    """
    if artifact.weights == "frozen":
        return _frozen(artifact, module)
    if not artifact.state:
        return list
    if module is None:
        raise BindError(
            f"the artifact of `{artifact.model}` uses the module's own weights, and no module was given",
            hint="pass the module: aotc.load(ref, module), or build it with `weights: frozen`",
        )
    _check_ties(artifact, module)
    return _live(module, artifact.state, device)


def _live(module: nn.Module, specs: Sequence[StateSpec], device: torch.device) -> TakeState:
    slots = [_slot(module, spec.name) for spec in specs]
    seen: tuple[list[Any], list[int]] = ([], [])

    def take() -> list[Tensor]:
        nonlocal seen
        current: list[Any] = [owner.get(key) for owner, key in slots]
        tensors, pointers = seen
        try:
            now = list(map(_data_ptr, current))
        except TypeError:
            now = []
        if now != pointers or not all(map(operator.is_, current, tensors)):
            check_state(specs, current, device)
            seen = current, now
        return current

    take()
    return take


def _slot(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return {}, key
    return (owner._parameters if key in owner._parameters else owner._buffers), key


def check_state(specs: Sequence[StateSpec], tensors: Sequence[Tensor | None], device: torch.device) -> None:
    """Compare each tensor with its spec; raises BindError with every mismatch, both values each."""
    issues = [
        issue for spec, tensor in zip(specs, tensors, strict=True) for issue in _state_issues(spec, tensor, device)
    ]
    if issues:
        raise BindError(
            "the module's tensors are not those that the artifact was built for",
            issues=tuple(issues),
            hint="load the artifact with the model and dtype of its manifest, on the device that it runs on",
        )


def _state_issues(spec: StateSpec, tensor: Tensor | None, device: torch.device) -> list[Issue]:
    if tensor is None:
        return [Issue("the module has no such parameter or buffer", where=spec.name)]
    pairs = (
        ("dtype", spec.dtype, dtype_name(tensor.dtype)),
        ("shape", list(spec.shape), list(tensor.shape)),
        ("stride", _used_strides(spec.shape, spec.stride), _used_strides(tensor.shape, tensor.stride())),
        ("device", str(device), str(tensor.device)),
    )
    return [
        Issue(
            f"built for {label} {expected}, the module's is {actual}",
            where=spec.name,
            expected=str(expected),
            actual=str(actual),
        )
        for label, expected, actual in pairs
        if expected != actual
    ]


def _used_strides(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Strides with those of axes of size 1 set to 0: no element is ever reached through them."""
    return [step if size != 1 else 0 for size, step in zip(shape, stride, strict=True)]


def _check_ties(artifact: Artifact, module: nn.Module) -> None:
    state = named_state(module)
    issues = [
        Issue(
            f"was one tensor with `{spec.name}` at build, and is another one here",
            where=alias,
            hint="tie them before the load",
        )
        for spec in artifact.state
        for alias in spec.aliases
        if state.get(alias) is not state.get(spec.name)
    ]
    if issues:
        raise BindError("weights that were tied at build are not tied here", issues=tuple(issues))


def _frozen(artifact: Artifact, module: nn.Module | None) -> TakeState:
    if module is None:
        return list
    state = named_state(module)
    tensors = [state.get(spec.name) for spec in artifact.state]
    present = {spec.name: tensor for spec, tensor in zip(artifact.state, tensors, strict=True) if tensor is not None}
    digests = tensor_digests(present)
    issues = [
        Issue(
            "is not the tensor that was frozen in" if spec.name in present else "the module has no such tensor",
            where=spec.name,
            expected=spec.digest,
            actual=digests.get(spec.name, ""),
        )
        for spec in artifact.state
        if digests.get(spec.name) != spec.digest
    ]
    if issues:
        raise BindError(
            f"the artifact of `{artifact.model}` holds frozen weights, and the module's are others",
            issues=tuple(issues),
            hint="rebuild it for this checkpoint, or build with `weights: live`",
        )
    watched = list(present.values())
    slots = [_slot(module, name) for name in present]

    def stamps() -> list[tuple[int, int]]:
        return [(owner[key].data_ptr(), owner[key]._version) for owner, key in slots]

    frozen_at = [(tensor.data_ptr(), tensor._version) for tensor in watched]

    def take() -> list[Tensor]:
        if stamps() != frozen_at:
            changed = [name for name, a, b in zip(present, stamps(), frozen_at, strict=True) if a != b]
            raise BindError(
                f"weights of the module changed after the load: {', '.join(changed[:5])}; "
                f"the artifact of `{artifact.model}` holds the frozen old ones",
                hint="rebuild it for the new weights, or build with `weights: live`",
            )
        return []

    return take
