"""What a module was when it was looked at, mostly by identity: a call in eager asks in microseconds if it is so still.

`aotc.tools.remembering.memory.identity` says what it depends on, by value, which takes milliseconds: it is asked again
only where this look no longer holds. What calls of the module change, as a number of calls, is left out once it was
seen.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from aotc.reads.attributes import ORDERED, is_anothers, own_attributes
from aotc.reads.facts import IN_STEP

MOST_FORMS_HELD = 4096
_DEPTH = 4
_FORM = attrgetter("dtype", "device")
_ABSENT = object()


class ModuleLook:
    """The attributes, tables and hooks of a module's parts, and what lists, dicts and objects among them hold."""

    def __init__(self, module: nn.Module, by_calls: frozenset[tuple[int, Any]] = frozenset()) -> None:
        """`by_calls`: what calls change, as the id of a dict and a key in it."""
        self.module, self.by_calls = module, by_calls
        changing = {owner for owner, _ in by_calls}
        found = list({id(each): each for each in _holders(module)}.values())
        dicts = [each for each in found if isinstance(each, dict)]
        self._dicts = [each for each in dicts if id(each) not in changing and each]
        self._empty = [each for each in dicts if id(each) not in changing and not each]
        self._changing = [(each, self._kept(each)) for each in dicts if id(each) in changing]
        self._others = [each for each in found if not isinstance(each, dict)]
        self._ordered = [part._modules for part in module.modules() if isinstance(part, ORDERED)]
        self._are_equal = operator.eq if all(type(each) in IN_STEP for each in self._dicts) else _have_equal_items
        self._copies, self._items = list(map(dict.copy, self._dicts)), self._now()
        held = chain(*map(dict.values, self._copies), *self._items)
        self._tensors = [value for value in held if isinstance(value, Tensor)]
        self._forms = list(map(_FORM, self._tensors))
        self.held_after: Counter[Hashable] = Counter()
        """After how many calls of a form all was as before them."""

    def holds(self) -> bool:
        """Whether all is as it was."""
        try:
            return (
                not any(self._empty)
                and self._are_equal(self._dicts, self._copies)  # compares values by identity first
                and (not self._items or self._now() == self._items)
                and list(map(_FORM, self._tensors)) == self._forms
                and all(_is_same(self._kept(each), before) for each, before in self._changing)
            )
        except Exception:  # of a comparison of values that are not the same, or since another thread changes a dict
            return False

    def has_held_after(self, form: Hashable) -> None:
        """Count a call of this form that has changed nothing."""
        if len(self.held_after) >= MOST_FORMS_HELD:
            self.held_after.clear()
        self.held_after[form] += 1

    def with_changes(self) -> ModuleLook:
        """The module as it is now, after a call that has changed it: what differs is what calls change."""
        now = ModuleLook(self.module)
        before, after = self._by_slot(), now._by_slot()
        slots = [slot for slot in {**before, **after} if before.get(slot, _ABSENT) is not after.get(slot, _ABSENT)]
        return ModuleLook(self.module, self.by_calls | frozenset(slots))

    def _now(self) -> list[list[Any]]:
        """What the lists and the like hold, and the names of parts where their order matters."""
        return list(map(list, chain(self._others, self._ordered)))

    def _kept(self, each: dict[Any, Any]) -> dict[Any, Any]:
        return {key: value for key, value in each.items() if (id(each), key) not in self.by_calls}

    def _by_slot(self) -> dict[tuple[int, Any], Any]:
        """What stood in each dict, by its id and the key; of a list, by its id and the place."""
        found = {}
        for holder, copied in zip(self._dicts, self._copies, strict=True):
            found.update({(id(holder), key): value for key, value in copied.items()})
        for held, items in zip([*self._others, *self._ordered], self._items, strict=True):
            found.update({(id(held), place): item for place, item in enumerate(items)})
        for each, before in self._changing:
            found.update({(id(each), key): value for key, value in before.items()})
        return found


def _have_equal_items(dicts: Sequence[dict[Any, Any]], copies: Sequence[dict[Any, Any]]) -> bool:
    """As `==`, also of classes that compare in a way of their own."""
    return all(map(dict.__eq__, dicts, copies))


def _is_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(now) == len(before) and all(before.get(key, _ABSENT) is value for key, value in now.items())


def _holders(module: nn.Module) -> Iterator[Any]:
    """The dicts, lists and the like that say what a module is."""
    for part in module.modules():
        yield vars(part)
        yield from (part._parameters, part._buffers, part._modules, part._forward_hooks, part._forward_pre_hooks)
        for name, value in vars(part).items():
            if name not in _TORCHS:
                yield from _within(value, _DEPTH)


_TORCHS = frozenset(vars(nn.Module()))


def _within(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, nn.Module | Tensor | type) or not depth or getattr(type(value), "is_compiled_code", False):
        return  # what aotc has put there notes what ran
    if isinstance(value, dict | list | set | deque):
        yield value
    own: dict[str, Any] = (own_attributes(value) or {}) if is_anothers(type(value)) else {}
    if own and getattr(value, "__dict__", None):
        yield vars(value)
    inner = [*own.values(), *(value.values() if isinstance(value, dict) else ())]
    if isinstance(value, list | tuple | deque):
        inner += value
    for each in inner:
        yield from _within(each, depth - 1)
