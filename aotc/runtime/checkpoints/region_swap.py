"""Other tensors in a module of which regions are compiled: in the module and in the states of all regions at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from aotc.reads.tensors import plain_state
from aotc.runtime.checkpoints.module_swap import commit, in_every_place, swapped
from aotc.runtime.state.call_state import State, Swap
from aotc.runtime.state.inner_tensors import SubclassState

if TYPE_CHECKING:
    from aotc.runtime.state.read_write_lock import ReadWriteLock
    from aotc.runtime.state.weights import ModuleState


class RegionStates(SubclassState):
    """The tensors of the whole module, with `parts`: the path and the state of each instance of a region."""

    def __init__(
        self, module: nn.Module, parts: Sequence[tuple[str, ModuleState]], device: torch.device, gate: ReadWriteLock
    ) -> None:
        super().__init__(module, (), device, gate=gate)
        self._parts = parts

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        with self._gate.replacing:
            now = plain_state(self._module)
            placed = in_every_place(now, tensors)
            parts = tuple(swapped(state, _within(path, placed)) for path, state in self._parts)
            return Swap(State(now[name] for name in placed), State(placed.values()), placed, parts)

    def commit(self, swap: Swap) -> bool:
        parts = [(state, part) for (_, state), part in zip(self._parts, swap.parts, strict=True)]
        return commit(self._gate, parts, [(self, swap)])


def _within(path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the submodule at the path, by their names in it."""
    prefix = f"{path}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
