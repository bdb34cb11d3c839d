"""The module's own tensors as arguments of a library.

A live library holds no weights: every parameter and buffer is an argument of each call. So an in-place change is seen
at once, a tensor put in a parameter's place is noticed at the next call and checked before it is used, and nothing can
be half old and half new. A frozen library holds its weights; a module that is given beside it is watched for changes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

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
        return _nothing()
    if module is None:
        raise BindError(
            f"the artifact of `{artifact.model}` uses the module's own weights, and no module was given",
            hint="pass the module: aotc.load(ref, module), or build it with `weights: frozen`",
        )
    return _live(module, artifact.state, device)


def _nothing() -> TakeState:
    """No tensors, in one list that stays the same, as `_live` gives it."""
    none: list[Tensor] = []
    return lambda: none


class _Seen(NamedTuple):
    """The tensors that passed the check last.

    `aliases` share their storage and so keep it: no other tensor can come to lie at one of `pointers` unnoticed.
    """

    tensors: list[Tensor]
    pointers: list[int]
    aliases: list[Tensor]
    state: list[Tensor]
    """What `take` gives: the same list until a tensor is replaced, so what was captured for it is known to be good."""


def _live(module: nn.Module, specs: Sequence[StateSpec], device: torch.device) -> TakeState:
    names = [spec.name for spec in specs] + [alias for spec in specs for alias in spec.aliases]
    check_tree = _watch_tree(module, names)
    slots = [_slot(module, name) for name in names]
    count = len(specs)

    def check() -> _Seen:
        current = [owner.get(key) for owner, key in slots]
        check_state(specs, current[:count], device, current[count:])
        tensors = cast("list[Tensor]", current)
        return _Seen(tensors, list(map(_data_ptr, tensors)), [tensor.detach() for tensor in tensors], tensors[:count])

    seen = check()

    def take() -> list[Tensor]:
        nonlocal seen  # replaced as a whole: any thread may call, and each gives only a list that it found checked
        check_tree()
        last = seen
        current: list[Any] = [owner.get(key) for owner, key in slots]
        if not all(map(operator.is_, current, last.tensors)) or list(map(_data_ptr, current)) != last.pointers:
            seen = checked = check()
            return checked.state
        return last.state

    return take


def _watch_tree(module: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """A function that raises BindError once a submodule that holds one of these tensors is another object.

    Its tensors could be found, but its class and attributes are not those that were checked at the load.
    """
    parents = [name.split(".")[:-1] for name in names]
    paths = sorted({".".join(parent[: end + 1]) for parent in parents for end in range(len(parent))})
    edges = [(_modules_of(module, path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths]
    children = [owner.get(key) for owner, key in edges]

    def check() -> None:
        now = [owner.get(key) for owner, key in edges]
        if not all(map(operator.is_, now, children)):
            replaced = [path for path, old, new in zip(paths, children, now, strict=True) if old is not new]
            raise BindError(
                f"submodules were replaced after the load: {', '.join(replaced[:5])}",
                hint="call aotc.load again, which checks the new ones",
            )

    return check


def _modules_of(module: nn.Module, path: str) -> Mapping[str, Any]:
    try:
        return module.get_submodule(path)._modules
    except AttributeError:
        return {}


def _slot(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return {}, key
    return (owner._parameters if key in owner._parameters else owner._buffers), key


def check_state(
    specs: Sequence[StateSpec],
    tensors: Sequence[Tensor | None],
    device: torch.device,
    aliases: Sequence[Tensor | None],
) -> None:
    """Compare each tensor with its spec, and the specs' aliases, in order; raises BindError with every mismatch."""
    issues = [
        issue for spec, tensor in zip(specs, tensors, strict=True) for issue in _state_issues(spec, tensor, device)
    ]
    tied = ((spec.name, tensor, alias) for spec, tensor in zip(specs, tensors, strict=True) for alias in spec.aliases)
    loose = [
        Issue(f"was one tensor with `{name}` at build, and is another one here", where=alias, hint="tie them again")
        for (name, tensor, alias), other in zip(tied, aliases, strict=True)
        if other is not tensor
    ]
    if issues:
        raise BindError(
            "the module's tensors are not those that the artifact was built for",
            issues=(*issues, *loose),
            hint="load the artifact with the model and dtype of its manifest, on the device that it runs on",
        )
    if loose:
        raise BindError("weights that were tied at build are not tied here", issues=tuple(loose))


def _state_issues(spec: StateSpec, tensor: Tensor | None, device: torch.device) -> list[Issue]:
    if tensor is None:
        return [Issue("the module has no such parameter or buffer", where=spec.name)]
    if tensor.layout is not torch.strided:
        return [Issue(f"built for a dense tensor, the module's is {tensor.layout}", where=spec.name)]
    pairs = (
        ("dtype", spec.dtype, dtype_name(tensor.dtype)),
        ("shape", list(spec.shape), list(tensor.shape)),
        ("stride", _used_strides(spec.shape, spec.stride), _used_strides(tensor.shape, tensor.stride())),
        ("device", str(device), str(tensor.device)),
        ("lazy view", "none", "conj or neg" if tensor.is_conj() or tensor.is_neg() else "none"),
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


def _frozen(artifact: Artifact, module: nn.Module | None) -> TakeState:
    if module is None:
        return _nothing()
    state = named_state(module)
    tensors = [state.get(spec.name) for spec in artifact.state]
    present = {spec.name: tensor for spec, tensor in zip(artifact.state, tensors, strict=True) if tensor is not None}
    digests = tensor_digests(present)
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
    check_tree = _watch_tree(module, present)
    slots = [_slot(module, name) for name in present]
    watched = list(present.values())
    frozen_at = list(map(_stamp, watched))
    nothing: list[Tensor] = []
    storages = [tensor.detach() for tensor in watched]

    def take(_keep: Sequence[Tensor] = storages) -> list[Tensor]:
        """`_keep` holds the storages, so that no other tensor can come to lie at the same address unnoticed."""
        check_tree()
        now = [owner.get(key) for owner, key in slots]
        if not all(map(operator.is_, now, watched)) or list(map(_stamp, watched)) != frozen_at:
            pairs = zip(present, now, map(_stamp, watched), watched, frozen_at, strict=True)
            changed = [name for name, new, stamp, old, then in pairs if new is not old or stamp != then]
            raise BindError(
                f"weights of the module changed after the load: {', '.join(changed[:5])}; "
                f"the artifact of `{artifact.model}` holds the frozen old ones",
                hint="rebuild it for the new weights, or build with `weights: live`",
            )
        return nothing

    return take


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Changes with `p.data = …` and with every in-place operator; not with one on `p.data`, which torch hides."""
    return tensor.data_ptr(), tensor._version


def _frozen_issues(spec: StateSpec, tensor: Tensor | None, digests: Mapping[str, str]) -> list[Issue]:
    if tensor is None:
        return [Issue("the module has no such tensor", where=spec.name, expected=spec.digest)]
    kind = (spec.dtype, spec.shape)
    here = (dtype_name(tensor.dtype), tuple(tensor.shape))
    if kind != here:
        built, now = (f"{dtype} {list(shape)}" for dtype, shape in (kind, here))
        return [Issue(f"built for {built}, the module's is {now}", where=spec.name, expected=built, actual=now)]
    if digests[spec.name] == spec.digest:
        return []
    return [
        Issue("is not the tensor that was frozen in", where=spec.name, expected=spec.digest, actual=digests[spec.name])
    ]
