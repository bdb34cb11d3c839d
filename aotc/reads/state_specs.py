"""The specs in a record of a module's tensors: of all, of some submodules', and of those that no checkpoint holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from aotc.digest import sha256_json
from aotc.reads.tensors import NO_SUBCLASSES, dtype_name, named_state, tensor_digests
from aotc.records import StateSpec


def state_specs(
    state: Mapping[str, Tensor], names: Iterable[str], digests: bool, subclasses: Mapping[str, Any] = NO_SUBCLASSES
) -> tuple[StateSpec, ...]:
    """The specs of `names` in order; `aliases` are the other names of the same tensor object, `subclasses` describes
    by name what holds a tensor."""
    by_identity: dict[int, list[str]] = {}
    for name, tensor in state.items():
        by_identity.setdefault(id(tensor), []).append(name)
    names = list(names)
    digest_of = tensor_digests({name: state[name] for name in names}) if digests else {}
    return tuple(
        StateSpec(
            name=name,
            dtype=dtype_name(state[name].dtype),
            shape=tuple(state[name].shape),
            stride=tuple(state[name].stride()),
            aliases=tuple(alias for alias in by_identity[id(state[name])] if alias != name),
            digest=digest_of.get(name, ""),
            subclass=subclasses.get(name),
        )
        for name in names
    )


def state_forms(module: nn.Module) -> dict[str, str]:
    """Dtype and shape of each parameter and buffer, of a subclass of Tensor those of the tensors that it holds; with
    the strides of one that is not dense, the other names of a tied one, and a digest of what such a class is."""
    from aotc.tensors.subclasses import descriptions, unwrapped

    named = named_state(module)
    state = unwrapped(named)
    return {
        spec.name: " ".join(
            (
                spec.dtype,
                str(list(spec.shape)),
                *([] if spec.stride == _dense(spec.shape) else [f"strides {list(spec.stride)}"]),
                *([f"also {', '.join(spec.aliases)}"] if spec.aliases else []),
                *([sha256_json(spec.subclass)] if spec.subclass is not None else []),
            )
        )
        for spec in state_specs(state, state, digests=False, subclasses=descriptions(named))
    }


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that torch gives a new tensor."""
    strides = itertools.accumulate(reversed(shape[1:]), lambda stride, size: stride * max(size, 1), initial=1)
    return tuple(reversed([*strides])) if shape else ()


def named_constants(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that no checkpoint of the module holds: those that are not persistent under any of their names."""
    persistent: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    left_out: dict[str, Tensor] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in owner._buffers.items():
            if tensor is not None:
                names = left_out if key in owner._non_persistent_buffers_set else persistent
                names[f"{path}.{key}" if path else key] = tensor
    kept = {id(tensor) for tensor in persistent.values()}
    return {name: tensor for name, tensor in left_out.items() if id(tensor) not in kept}


def submodules(module: nn.Module, paths: Iterable[str]) -> nn.Module:
    """A module that holds the submodules at these paths, under their own names, and nothing else of `module`.

    Raises AttributeError for a path that names none.
    """
    holder = nn.ModuleDict()
    holder._modules.update({path: module.get_submodule(path) for path in paths})
    holder.training = module.training
    return holder
