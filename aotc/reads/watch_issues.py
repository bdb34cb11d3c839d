"""What of a module, and of what its code reads elsewhere, has changed since the load, with both values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from aotc.digest import canonical_json
from aotc.errors import Issue
from aotc.reads.attributes import (
    NO_VALUE,
    backward_hooks,
    forward_hooks,
    hooks_on_all_modules,
    is_torchs,
    kind_of,
    kind_of_class,
)
from aotc.reads.outside import ENVIRONMENT, Step, attribute_of
from aotc.reads.watch import ModuleWatch, Seen, Tree, here, look_inside

_SWAPPED = "set it back, or call compiled.refresh(), which checks the new one"


def changes(seen: Seen, watch: ModuleWatch) -> list[Issue]:
    """Issues for each place that differs from the values that were seen."""
    tree, slots = watch.look()
    named = [
        *_tree_changes(seen.tree, tree),
        *_value_changes(seen.inside, look_inside(slots, tree.ids)),
        *_value_changes(seen.outside, watch.look_outside(slots)),
        *(_hook_changes(seen, tree, watch.trains) if watch.hooks else ()),
    ]
    return named or list(_inner_changes(seen.inner, tree))


def _tree_changes(then: Tree, now: Tree) -> Iterator[Issue]:
    classes = dict(zip(then.parts, then.classes, strict=False))
    for holder, cls in zip(then.holders[len(then.parts) :], then.classes[len(then.parts) :], strict=True):
        if _does_otherwise(type(holder), cls):
            built, here = cls.__qualname__, type(holder).__qualname__
            yield Issue(f"the class of an object was {built} at the load, it is {here} now", "", built, here, _SWAPPED)
    for path in dict.fromkeys([*then.parts, *now.parts]):
        old, new = then.parts.get(path), now.parts.get(path)
        if old is not new:
            built, here = (type(part).__qualname__ if part is not None else "no module" for part in (old, new))
            what = f"the submodule was replaced after the load: a {built} then, a {here} now"
            yield Issue(what, where=path, expected=built, actual=here, hint=_SWAPPED)
        elif _does_otherwise(type(new), classes[path]):
            built, here = classes[path].__qualname__, type(new).__qualname__
            yield Issue(f"its class was {built} at the load, it is {here} now", path, built, here, _SWAPPED)
    for part, order in zip(then.ordered, then.orders, strict=True):
        if [*part._modules] != order and {*part._modules} == {*order}:
            built, here = ", ".join(order), ", ".join(part._modules)
            yield Issue(f"the parts were {built} at the load, they are {here} now", "", built, here, _SWAPPED)
    yield from _hidden_changes(then, now)
    for tensor, cls in zip(then.tensors, then.tensor_classes, strict=True):
        if (built := kind_of_class("tensor", cls)) != (here := kind_of_class("tensor", type(tensor))):
            where = next((path for path, held in _tensors(now) if held is tensor), "")
            yield Issue(f"a {built} at the load, a {here} now", where, built, here, _SWAPPED)
    copies = {id(table): copy for table, copy in zip(then.tables, then.copies, strict=True)}
    for path, part in then.parts.items():
        for kind, table in (("parameter", part._parameters), ("buffer", part._buffers), ("module", part._modules)):
            before = copies.get(id(table), {})
            for name in before.keys() | table.keys():
                built, here = (_kind(kind, held.get(name, _ABSENT)) for held in (before, table))
                if built != here:
                    where = f"{path}.{name}".removeprefix(".")
                    yield Issue(f"{built} at the load, {here} now", where, built, here, _SWAPPED)


def _hidden_changes(then: Tree, now: Tree) -> Iterator[Issue]:
    for path in dict.fromkeys([*then.hidden, *now.hidden]):
        built, here = (_text(tree.hidden[path]) if path in tree.hidden else "nothing" for tree in (then, now))
        if built != here:
            what = f"{built} hid this entry of the module at the load, {here} hides it now"
            yield Issue(what, where=path, expected=built, actual=here, hint=_SWAPPED)


def _tensors(tree: Tree) -> Iterator[tuple[str, Any]]:
    for path, part in tree.parts.items():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            yield f"{path}.{name}".removeprefix("."), tensor


def _does_otherwise(now: type, then: type) -> bool:
    """Whether a class is another one than it was, and no subclass of it that adds methods of torch's alone, as FSDP2
    puts in the place of a module's class."""
    if now is then:
        return False
    if not issubclass(now, then) or getattr(now, "forward", None) is not getattr(then, "forward", None):
        return True
    added = [cls for cls in now.__mro__ if cls not in then.__mro__ and not is_torchs(cls)]
    return any(hasattr(then, name) and name not in _OF_EVERY_CLASS for cls in added for name in vars(cls))


_OF_EVERY_CLASS = {*vars(type("Plain", (), {})), "__deepcopy__", "__annotations__", "__qualname__"}


_ABSENT: Any = object()


def _kind(kind: str, held: Any) -> str:
    if held is _ABSENT:
        return "absent"
    return f"no {kind}" if held is None else f"a {kind_of(kind, held)}"


def _value_changes(then: dict[str, Any], now: dict[str, Any]) -> Iterator[Issue]:
    for path in sorted(then.keys() | now.keys()):
        built, here = then.get(path, NO_VALUE), now.get(path, NO_VALUE)
        if built is not here and _text(built) != _text(here):
            values = ("another value", "this one") if path.startswith(ENVIRONMENT) else (_shown(built), _shown(here))
            yield Issue(f"{values[0]} at the load, {values[1]} now", where=path, expected=values[0], actual=values[1])


def _inner_changes(steps: Iterable[Step], tree: Tree) -> Iterator[Issue]:
    for owner, key, built in steps:
        now = owner.get(key) if isinstance(owner, dict) else attribute_of(owner, key)
        if now is not built:
            yield from _value_changes({str(key): here(built, tree.ids)}, {str(key): here(now, tree.ids)})


def _hook_changes(seen: Seen, tree: Tree, trains: bool) -> Iterator[Issue]:
    for path, part in tree.parts.items():
        built, now = seen.hooks_of.get(id(part)), [*map(here, forward_hooks(part))]
        if built is not None and now != built:
            yield _hooks(path or type(part).__qualname__, len(built), len(now))
        if trains and built is not None and (count := sum(map(len, backward_hooks([part])))):
            yield _hooks(path or type(part).__qualname__, 0, count)
    if count := sum(map(len, hooks_on_all_modules(trains))):
        yield _hooks("all modules", 0, count)


def _text(value: Any) -> str:
    return "nothing of its own" if value is NO_VALUE else canonical_json(value).decode()


def _shown(value: Any) -> str:
    return _text(value)[:60]


def _hooks(where: str, built: int, here: int) -> Issue:
    what = f"{built} hooks at the load, {here} now; compiled code runs none that was registered since"
    return Issue(what, where=where, expected=str(built), actual=str(here), hint="remove them")
