"""The tensors of a module, as the state of a library.

A call takes all of them at once, as one `State` that never changes, so nothing can be half old and half new. They stay
the module's own: an in-place change is seen at once, and a tensor put in a parameter's place is noticed at the next
call and checked before it is used. (Those of a checkpoint: `aotc.runtime.checkpoints`.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from aotc.reads.tensors import plain_state
from aotc.runtime.state.call_state import SeenTensors, State, StateRows, Swap, check_state, data_ptr, form_of, saw
from aotc.runtime.state.read_write_lock import ReadWriteLock
from aotc.tensors.layouts import with_strides

if TYPE_CHECKING:
    from aotc.records import StateSpec
    from aotc.runtime.checkpoints.checkpoint_files import Checkpoint

T = TypeVar("T")


class ModuleState:
    """The tensors of a module, wherever they are replaced: by its owner, or by an update of all names at once."""

    owned = False

    def __init__(
        self,
        module: nn.Module,
        specs: Sequence[StateSpec],
        device: torch.device,
        written: frozenset[str] = frozenset(),
        gate: ReadWriteLock | None = None,
    ) -> None:
        """`written` names the tensors that the model writes to."""
        self._module, self._specs, self._device, self._written = module, specs, device, written
        self._gate = gate or ReadWriteLock()
        self._generation = 0
        self._look()
        self._seen = self._check()

    def _look(self) -> None:
        names = [spec.name for spec in self._specs] + [alias for spec in self._specs for alias in spec.aliases]
        self._slots = self._slots_of(names)
        self._owners, self._keys = [owner for owner, _ in self._slots], [key for _, key in self._slots]

    def _slots_of(self, names: Iterable[str]) -> list[tuple[dict[str, Any], str]]:
        return slots_of(self._module, names)

    def refresh(self) -> None:
        with self._gate.replacing:
            self._look()
            if not self._is_current(self._seen):
                self._seen = self._check()

    def take(self) -> State:
        last = self._seen  # replaced as a whole: any thread may call, and each gives only a state that it found checked
        if self._is_current(last):
            return last.state
        with self._gate.replacing:
            if not self._is_current(self._seen):
                self._seen = self._check()
            return self._seen.state

    def run_eagerly(self, function: Callable[[], T]) -> T:
        """Call what runs the module: no update replaces its tensors meanwhile."""
        return self._gate.run_inside(function)

    def _is_current(self, seen: SeenTensors) -> bool:
        current: list[Any] = list(map(dict.get, self._owners, self._keys))
        return (
            all(map(operator.is_, current, seen.tensors))
            and list(map(type, current)) == seen.classes
            and list(map(data_ptr, current)) == seen.pointers
            and list(map(form_of, current)) == seen.forms
        )

    def seen(self) -> SeenTensors:
        return self._seen

    def rows(self, seen: SeenTensors) -> StateRows:
        slots = [(owner, key, tensor) for (owner, key), tensor in zip(self._slots, seen.tensors, strict=True)]
        placed = zip(seen.tensors, seen.pointers, seen.aliases, strict=True)
        return StateRows(seen.state, ((vars(self), "_seen", seen), *slots), placed=tuple(placed))

    def _check(self) -> SeenTensors:
        current = [owner.get(key) for owner, key in self._slots]
        count = len(self._specs)
        check_state(self._specs, current[:count], self._device, current[count:], self._written)
        tensors = cast("list[Tensor]", current)
        state = (with_strides(tensor, spec.stride) for spec, tensor in zip(self._specs, tensors, strict=False))
        return saw(tensors, State(state, self._next()))

    def _next(self) -> int:
        self._generation += 1
        return self._generation

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """For any tensor of the module, also one that no variant takes: module and compiled code go on agreeing."""
        from aotc.runtime.checkpoints.module_swap import read_replacements

        return read_replacements(self._module, self._specs, self._device, checkpoint)

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        from aotc.runtime.checkpoints.module_swap import in_every_place, swapped

        with self._gate.replacing:
            return swapped(self, in_every_place(plain_state(self._module), tensors))

    def commit(self, swap: Swap) -> bool:
        from aotc.runtime.checkpoints.module_swap import commit

        return commit(self._gate, [(self, swap)])


def slots_of(module: nn.Module, names: Iterable[str]) -> list[tuple[dict[str, Any], str]]:
    """Where the module keeps parameters and buffers: for each the dict and the key in it, or an empty dict."""
    modules = _modules_of(module)
    slots: list[tuple[dict[str, Any], str]] = []
    for name in names:
        path, _, key = name.rpartition(".")
        held: Any = {}
        if (owner := modules.get(path)) is not None:
            held = owner._parameters if key in owner._parameters else owner._buffers
        slots.append((held, key))
    return slots


def _modules_of(module: nn.Module) -> dict[str, nn.Module]:
    """By their paths, in one walk: asking a module for each of its paths takes ten times as long."""
    return dict(module.named_modules(remove_duplicate=False))
