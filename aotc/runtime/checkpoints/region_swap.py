"""Other tensors in a module of which regions are compiled: in the module and in the states of all regions at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aotc.runtime.checkpoints.module_swap import in_every_place
from aotc.runtime.state.gate import Gate
from aotc.runtime.state.subclasses import SubclassState
from aotc.runtime.state.weights import ModuleState, State, Swap
from aotc.snapshot.tensors import plain_state


class RegionStates(SubclassState):
    """The tensors of the whole module, with `parts`: the path and the state of each instance of a region."""

    def __init__(
        self, module: nn.Module, parts: Sequence[tuple[str, ModuleState]], device: torch.device, gate: Gate
    ) -> None:
        super().__init__(module, (), device, gate=gate)
        self._parts = parts

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        with self._gate.replacing:
            now = plain_state(self._module)
            placed = in_every_place(now, tensors)
            parts = tuple(state.swapped(_within(path, placed)) for path, state in self._parts)
            return Swap(State(now[name] for name in placed), State(placed.values()), placed, parts)

    def is_base(self, swap: Swap) -> bool:
        return all(state.is_base(part) for (_, state), part in zip(self._parts, swap.parts, strict=True))

    def assignments(self, swap: Swap) -> list[tuple[dict[str, Any], str, Any]]:
        found = super().assignments(swap)
        for (_, state), part in zip(self._parts, swap.parts, strict=True):
            found += state.assignments(part)
        return found


def _within(path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the submodule at the path, by their names in it."""
    prefix = f"{path}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
