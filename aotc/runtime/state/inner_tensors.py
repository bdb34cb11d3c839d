"""A module whose parameters keep their values in other tensors, as torchao's quantised ones do (`weights: live`).

Compiled code takes these inner tensors, where they lie. Each call looks at what holds them, too: a parameter that is
put in the place of another is noticed, described and compared before it is used.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from aotc.runtime.state.descriptions import check_subclasses
from aotc.runtime.state.weights import ModuleState
from aotc.tensors.subclasses import holders, inner_name, is_wrapper, slots_of

if TYPE_CHECKING:
    from aotc.runtime.state.call_state import SeenTensors, StateRows

DictSlot = tuple[dict[str, Any], str]


class InnerTensor(NamedTuple):
    """The place that a tensor's name refers to: a parameter, its slot, and the path within it ("" for itself)."""

    parameter: str
    slot: DictSlot
    path: str

    def inner_slot(self) -> DictSlot:
        """Where the tensor itself is: in its wrapper's attributes. An empty dict where there is no such tensor."""
        owner, key = self.slot
        for name in filter(None, self.path.split(".")):
            held = owner.get(key)
            owner, key = (slots_of(held) if is_wrapper(held) else {}), name
        return owner, key


class SubclassState(ModuleState):
    """As ModuleState, where some tensors are inside parameters of a subclass of Tensor."""

    _held: tuple[list[dict[str, Any]], list[str], list[Any]]
    """Where each wrapper is, and which one was there at the last look."""
    _outer: dict[str, tuple[DictSlot, Any]]
    """By parameter: its slot, and the description that it must have."""

    def _slots_of(self, names: Iterable[str]) -> list[DictSlot]:
        return [place.inner_slot() for place in self._places(names)]

    def _places(self, names: Iterable[str]) -> list[InnerTensor]:
        modules = dict(self._module.named_modules(remove_duplicate=False))
        places = []
        for name in names:
            owner, _, path = name.rpartition(".")
            while owner not in modules:  # a module's name is not one of its parameters'
                owner, _, key = owner.rpartition(".")
                path = inner_name(key, path)
            key, _, path = path.partition(".")
            part = modules[owner]
            held: Any = part._parameters if key in part._parameters else part._buffers
            places.append(InnerTensor(inner_name(owner, key), (held, key), path))
        return places

    def _look(self) -> None:
        super()._look()
        within = [spec for spec in self._specs if spec.subclass is not None]
        names = [spec.name for spec in self._specs] + [alias for spec in self._specs for alias in spec.aliases]
        places = self._places(names)
        self._outer = {
            place.parameter: (place.slot, spec.subclass)
            for spec, place in zip(within, self._places(spec.name for spec in within), strict=True)
        }
        tensors: list[Any] = [owner.get(key) for owner, key in (place.slot for place in places)]
        wrappers = {
            (place.parameter, path): InnerTensor(place.parameter, place.slot, path).inner_slot()
            for place, tensor in zip(places, tensors, strict=True)
            if is_wrapper(tensor)
            for path in holders(tensor)
        }
        slots = [*wrappers.values(), *(slot for slot, _ in self._outer.values())]
        # Last: a thread that finds these to be current finds the slots of the same look.
        self._held = [owner for owner, _ in slots], [key for _, key in slots], [owner.get(key) for owner, key in slots]

    def _is_current(self, seen: SeenTensors) -> bool:
        return self._holds_the_same() and super()._is_current(seen)

    def rows(self, seen: SeenTensors) -> StateRows:
        held, rows = tuple(zip(*self._held, strict=True)), super().rows(seen)
        return rows._replace(slots=(*held, *rows.slots))

    def _holds_the_same(self) -> bool:
        owners, keys, tensors = self._held
        return all(map(operator.is_, map(dict.get, owners, keys), tensors))

    def _check(self) -> SeenTensors:
        if not self._holds_the_same():
            self._look()
        now = {name: owner.get(key) for name, ((owner, key), _) in self._outer.items()}
        check_subclasses({name: (expected, now[name]) for name, (_, expected) in self._outer.items()})
        return super()._check()
