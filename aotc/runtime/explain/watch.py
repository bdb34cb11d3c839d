"""What of a module has changed since the load, with both values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from aotc.digest import canonical_json
from aotc.errors import Issue
from aotc.runtime.state.watch import Seen, Slot
from aotc.snapshot.attributes import NO_VALUE, forward_hooks, hooks_on_all_modules, plain_forward, plain_value


def changes(seen: Seen, slots: Sequence[Slot], module: nn.Module) -> list[Issue]:
    """Issues for each slot of the module that differs from the values that were seen."""
    return [*_attribute_changes(seen, slots), *_hook_changes(seen, module)]


def _attribute_changes(seen: Seen, slots: Sequence[Slot]) -> Iterator[Issue]:
    then = {
        slot.path: seen.plain_of[index] if index in seen.plain_of else _plain(slot, seen.values[index])
        for index, slot in enumerate(seen.slots)
    }
    now = {slot.path: _plain(slot, slot.owner.get(slot.key)) for slot in slots}
    for path in sorted(then.keys() | now.keys()):
        built, here = then.get(path, NO_VALUE), now.get(path, NO_VALUE)
        if built is not here and _text(built) != _text(here):
            yield Issue(
                f"{_text(built)[:60]} at the load, {_text(here)[:60]} now",
                where=path,
                expected=_text(built)[:60],
                actual=_text(here)[:60],
            )


def _hook_changes(seen: Seen, module: nn.Module) -> Iterator[Issue]:
    for path, part in module.named_modules():
        built, here = seen.hooks_of.get(id(part)), forward_hooks(part)
        if built is not None and here != built:
            yield _hooks(path or type(part).__qualname__, len(built), len(here))
    if count := sum(map(len, hooks_on_all_modules())):
        yield _hooks("all modules", 0, count)


def _plain(slot: Slot, value: Any) -> Any:
    if slot.key == "forward":
        return NO_VALUE if value is None else plain_forward(slot.part, value)
    if isinstance(value, Tensor):
        return f"the tensor {id(value):#x}"
    is_object = dataclasses.is_dataclass(value) and not isinstance(value, type)  # of which the attributes are compared
    return NO_VALUE if is_object else plain_value(value)


def _text(plain: Any) -> str:
    return "nothing of its own" if plain is NO_VALUE else canonical_json(plain).decode()


def _hooks(where: str, built: int, here: int) -> Issue:
    what = f"{built} forward hooks at the load, {here} now; compiled code runs none that was registered since"
    return Issue(what, where=where, expected=str(built), actual=str(here), hint="remove them")
