"""Replace tensors of a module: which ones, and every place that holds an old one."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from aotc.checkpoints.checkpoint_forms import check_forms
from aotc.errors import BindError, Issue
from aotc.reads.state_specs import state_specs
from aotc.reads.tensors import named_state, same_bits
from aotc.records import names_of
from aotc.runtime.checkpoints.checkpoint_files import Checkpoint, by_inner_names, read_tensors
from aotc.runtime.state.call_state import State, Swap, saw
from aotc.runtime.state.read_write_lock import ReadWriteLock, set_all
from aotc.tensors.layouts import has_memory, with_strides
from aotc.tensors.overlaps import overlapping
from aotc.tensors.subclasses import descriptions, unwrapped

if TYPE_CHECKING:
    from aotc.records import StateSpec
    from aotc.runtime.state.weights import ModuleState


def read_replacements(
    module: nn.Module, own: Sequence[StateSpec], device: torch.device, checkpoint: Checkpoint
) -> dict[str, Tensor]:
    """For any tensor of the module, also one that no variant takes: module and compiled code go on agreeing.

    What lies on another device than compiled code, which takes none of it, stays there.
    """
    state = named_state(module)
    now = unwrapped(state)
    specs = _all_specs(now, descriptions(state), own)
    checkpoint = by_inner_names(checkpoint, specs)
    check_forms(checkpoint, specs, (), partial=True)
    by_device: dict[torch.device, list[StateSpec]] = {device: [*own]}
    for spec in specs[len(own) :]:
        by_device.setdefault(now[spec.name].device, []).append(spec)
    return {
        name: _like(tensor, now[name])
        for place, of_place in by_device.items()
        for name, tensor in read_tensors(checkpoint, of_place, place, lambda spec: True).items()
    }


def _all_specs(state: Mapping[str, Tensor], subclasses: Mapping[str, Any], own: Sequence[StateSpec]) -> list[StateSpec]:
    """The artifact's, and those of the module's other tensors as they are."""
    taken = {name for spec in own for name in names_of(spec)}
    others: dict[int, str] = {}
    for name, tensor in state.items():
        if name not in taken:
            others.setdefault(id(tensor), name)
    return [*own, *state_specs(state, others.values(), digests=False, subclasses=subclasses)]


def swapped(state: ModuleState, placed: Mapping[str, Tensor]) -> Swap:
    """The swap to tensors that are given for every place of a tensor that they replace."""
    base = state.take()
    if placed.keys().isdisjoint(spec.name for spec in state._specs):  # the same state, so graphs stay as they are
        return Swap(base, base, placed)
    made = with_tensors(base, state._specs, placed)
    made.state.generation = state._next()
    return made


def commit(
    gate: ReadWriteLock, checked: Sequence[tuple[ModuleState, Swap]], others: Sequence[tuple[ModuleState, Swap]] = ()
) -> bool:
    """Replace the tensors of all states, which share the gate; of none where one that is `checked` is not its swap's
    base. Returns whether they were replaced."""

    def replace() -> bool:
        with gate.replacing:
            if any(state.take() is not swap.base for state, swap in checked):
                return False
            pairs = (*others, *checked)
            owners, keys, values = zip(*(each for pair in pairs for each in _assignments(*pair)), strict=True)
            # In one call of C: neither a signal's handler nor another thread runs between two of the tensors.
            set_all(owners, keys, values)
            return True

    return gate.run_alone(replace)


def _assignments(state: ModuleState, swap: Swap) -> list[tuple[dict[str, Any], str, Any]]:
    """The assignments of a swap: a dict, a key and the new value."""
    slots = state._slots_of(swap.tensors)
    places = [(owner, key, tensor) for (owner, key), tensor in zip(slots, swap.tensors.values(), strict=True)]
    new = {(id(owner), key): tensor for owner, key, tensor in places}
    tensors = [cast(Tensor, new.get((id(owner), key), owner.get(key))) for owner, key in state._slots]
    return [*places, (vars(state), "_seen", saw(tensors, swap.state))]


def with_tensors(base: State, specs: Sequence[StateSpec], tensors: Mapping[str, Tensor]) -> Swap:
    """`base` with `tensors` in place of those that its specs call so."""
    replaced = [
        with_strides(tensors[spec.name], spec.stride) if spec.name in tensors else old
        for spec, old in zip(specs, base, strict=True)
    ]
    return Swap(base, State(replaced, base.generation + 1), tensors)


def in_every_place(now: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` for every place of a module, whose tensors are `now`, that holds a tensor that they replace.

    Raises BindError where names of one tensor get different values, or another one has a part of its memory.
    """
    names: dict[_Place, str] = {}
    loose = []
    for name, tensor in tensors.items():
        first = names.setdefault(_place_of(now[name]), name)
        if tensor is not tensors[first] and not same_bits(tensor, tensors[first]):
            loose.append(Issue(f"is one tensor with `{first}` in the module, and has other values here", where=name))
    if loose:
        hint = "give one name of each alone, or untie them in the module"
        raise BindError("weights that the module ties would not be equal", hint=hint, issues=tuple(loose))
    new: dict[int, Tensor] = {}
    for old in now.values():
        if (first := names.get(_place_of(old), "")) and id(old) not in new:
            tensor = tensors[first]
            new[id(old)] = tensor if old is now[first] else _like(tensor.detach(), old)
    _check_parts(now, new)
    return {name: new[id(old)] for name, old in now.items() if id(old) in new}


_Place = tuple[object, ...]


def _place_of(tensor: Tensor) -> _Place:
    """Equal for tensors of one memory: one object under several names, or several that are tied by their memory."""
    if not has_memory(tensor):
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _check_parts(now: Mapping[str, Tensor], replaced: Container[int]) -> None:
    """Raises BindError where one of two tensors of which one is part of the other is replaced, and not both."""
    names = {id(tensor): name for name, tensor in now.items()}
    tensors = list({id(tensor): tensor for tensor in now.values()}.values())
    given = {index for index, tensor in enumerate(tensors) if id(tensor) in replaced}
    issues = []
    for pair in overlapping(tensors, given):
        if not given.issuperset(pair):
            left, taken = (names[id(tensors[index])] for index in sorted(pair, key=given.__contains__))
            issues.append(Issue(f"lies in the memory of `{taken}`", where=left))
    if issues:
        raise BindError(
            "weights of which others are a part would be replaced without these",
            hint="give the others, too, or give each memory of its own in the module",
            issues=tuple(issues),
        )


def _like(tensor: Tensor, old: Tensor) -> Tensor:
    """A parameter if the old tensor is one."""
    return nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else tensor
