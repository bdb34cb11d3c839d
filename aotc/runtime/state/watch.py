"""What of a module compiled code depends on beside its tensors, looked at in every call: attributes, forwards, hooks.

Attributes are those that the captures read (`Variant.reads`). They are fetched and compared in a few calls of C; what
differs, and whether that matters, is looked at only then.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Collection, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from aotc.errors import BindError
from aotc.snapshot.attributes import attributes_in, forward_hooks, hooks_on_all_modules, objects_in, plain_value

SHOWN = 10
_COMPARED = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    FunctionType,
    type,
)


class Slot(NamedTuple):
    """An attribute: the path to it from the module, the dict that it stands in, and its name there."""

    path: str
    owner: dict[str, Any]
    key: str
    part: nn.Module


class Seen(NamedTuple):
    """What was found: the slots, and as many values; what those hold that may change, and a copy of that, and the plain
    form of each by its slot's position; the dicts that held no hooks, and the hooks of each module."""

    slots: list[Slot]
    owners: list[dict[str, Any]]
    keys: list[str]
    values: list[Any]
    containers: list[Any]
    copies: list[Any]
    plain_of: dict[int, Any]
    unhooked: list[dict[int, Any]]
    hooks_of: dict[int, list[Any]]


class ModuleWatch:
    """The attributes, forwards and hooks of a module as they are now, with which later ones are compared."""

    def __init__(self, module: nn.Module, reads: Collection[str], model: str, *, as_region: bool = False) -> None:
        """`as_region`: compiled code is the module's forward, and torch runs its hooks around it."""
        self._module, self._reads, self._model, self._as_region = module, reads, model, as_region
        self.refresh()

    def refresh(self) -> None:
        """Record the module's present values."""
        slots = list(_slots(self._module, self._reads, self._as_region))
        values = [slot.owner.get(slot.key) for slot in slots]
        held = {index: value for index, value in enumerate(values) if _may_change(value)}
        parts = list(self._module.modules())[1 if self._as_region else 0 :]
        hooks = [each for part in parts for each in (part._forward_hooks, part._forward_pre_hooks)]
        self._seen = Seen(  # replaced as a whole: any thread may call
            slots,
            [slot.owner for slot in slots],
            [slot.key for slot in slots],
            values,
            [*held.values(), *(each for each in hooks if each)],
            [*map(_copied, held.values()), *(dict(each) for each in hooks if each)],
            {index: plain_value(value) for index, value in held.items()},
            [each for each in (*hooks, *hooks_on_all_modules()) if not each],
            {id(part): forward_hooks(part) for part in parts},
        )

    def check(self) -> None:
        """Raises BindError where something is another than it was."""
        seen = self._seen
        try:
            is_same = (
                all(map(operator.is_, map(dict.get, seen.owners, seen.keys), seen.values))
                and seen.containers == seen.copies
                and not any(seen.unhooked)
            )
        except (RuntimeError, ValueError):  # a tensor or an array in a number's place is neither equal nor unequal
            is_same = False
        if is_same:
            return
        from aotc.runtime.explain.watch import changes

        if issues := changes(seen, list(_slots(self._module, self._reads, self._as_region)), self._module):
            raise BindError(
                f"the module of `{self._model}` is no longer as it was at the load",
                issues=tuple(issues[:SHOWN]),
                hint="set it back, or build the module as it is now; compiled.refresh() compares all of it anew",
            )
        self.refresh()


def _slots(module: nn.Module, reads: Collection[str], as_region: bool) -> Iterator[Slot]:
    names: dict[type, list[str]] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if path or not as_region:
            yield Slot(f"{prefix}forward", vars(part), "forward", part)
        for inner, holder in (("", part), *objects_in(part)):
            if type(holder) not in names:
                names[type(holder)] = attributes_in(holder, reads)
            own = vars(holder) if names[type(holder)] else {}
            for name in names[type(holder)]:
                yield Slot(f"{prefix}{inner}.{name}" if inner else f"{prefix}{name}", own, name, part)


def _may_change(value: Any) -> bool:
    """Whether a value is mutable and can be compared."""
    if isinstance(value, tuple):
        return any(map(_may_change, value)) and _is_compared(value, 4)
    return isinstance(value, list | dict | set | SimpleNamespace) and _is_compared(value, 4)


def _is_compared(value: Any, depth: int) -> bool:
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return depth > 0 and all(_is_compared(item, depth - 1) for item in value)
    return isinstance(value, _COMPARED)


def _copied(value: Any) -> Any:
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**_copied(vars(value)))
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_copied(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return set(value) if isinstance(value, set) else value
