"""What compiled code depends on beside its weights, looked at in every call: the module tree, hooks, forward's reads.

The look is a few calls of C over all places at once: the tables of parameters, buffers and children; the classes of the
parts, and how many attributes each has; the attributes, global variables, defaults and cells of closures that the
captures read (`Variant.reads`, `Reads.outside`); what the lists and dicts among these hold, and how often the tensors
were written to. What differs, and whether that matters, is looked at only then.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from functools import partial
from itertools import chain
from operator import attrgetter, is_not
from types import FunctionType, MethodType, MethodWrapperType
from typing import Any, NamedTuple

from torch import Tensor, nn

from aotc.errors import BindError
from aotc.reads.attributes import (
    NO_VALUE,
    ORDERED,
    attributes_in,
    backward_hooks,
    container_of,
    contents_of,
    digests_of,
    forward_hooks,
    hooks_on_all_modules,
    is_anothers,
    is_descriptor,
    objects_in,
    own_attributes,
    plain_forward,
    plain_value,
    slots_in,
)
from aotc.reads.outside import Outside, Step, attribute_of, within
from aotc.tensors.layouts import has_memory

SHOWN = 10


class Slot(NamedTuple):
    """An attribute: its path from the module, the dict that it stands in or the object with that slot, and its name."""

    path: str
    owner: Any
    key: str
    part: nn.Module

    def value(self) -> Any:
        """NO_VALUE where there is none."""
        has_slot = not isinstance(self.owner, dict)
        return getattr(self.owner, self.key, NO_VALUE) if has_slot else self.owner.get(self.key, NO_VALUE)


class Tree(NamedTuple):
    """The module tree: its parts by their paths, their ids, and these with the objects among their attributes; the
    tables that hold something, with copies; the parts in order, with their names; the classes of the holders, and
    the number of attributes of each part."""

    parts: dict[str, nn.Module]
    ids: frozenset[int]
    holders: list[Any]
    tables: list[dict[str, Any]]
    copies: list[dict[str, Any]]
    ordered: list[nn.Module]
    orders: list[list[str]]
    classes: list[type]
    own: list[dict[str, Any]]
    lengths: list[int]


class Seen(NamedTuple):
    """What was found: values in dicts and of objects' attributes, what the containers among them held (also as one
    sequence), and what must hold nothing.

    `inner` are places within values, `bound` attributes of which each look gives another object, as class methods.
    `tensors` are plain ones; `marks` are how often each was written to, and their addresses. `inside` and `outside`
    have what the values were, by name, and `hooks_of` has the hooks of each module.
    """

    tree: Tree
    owners: list[dict[Any, Any]]
    keys: list[Any]
    values: list[Any]
    objects: list[Any]
    names: list[str]
    of_objects: list[Any]
    inner: list[Step]
    bound: list[Step]
    dicts: list[dict[Any, Any]]
    others: list[Any]
    copies: list[Any]
    items: list[Any]
    tensors: list[Tensor]
    marks: list[int]
    arrays: list[Any]
    elements: list[bytes]
    empty: list[dict[Any, Any]]
    inside: dict[str, Any]
    outside: dict[str, Any]
    hooks_of: dict[int, list[Any]]


class ModuleWatch:
    """A module, and what its code reads elsewhere, as they are now, with which later ones are compared."""

    def __init__(
        self,
        module: nn.Module,
        reads: Collection[str],
        outside: Collection[str],
        model: str,
        *,
        as_region: bool = False,
        trains: bool = False,
        hooks: bool = True,
    ) -> None:
        """`as_region`: compiled code is the module's forward, and torch runs its hooks around it."""
        self.module, self.model, self.trains, self.hooks = module, model, trains, hooks
        self._reads, self._outside, self._as_region = reads, outside, as_region
        self.refresh()

    def refresh(self) -> None:
        """Record the present values."""
        tree, slots = self.look()
        hooked = list(tree.parts.values())[1 if self._as_region else 0 :] if self.hooks else []
        hooks = [table for part in hooked for table in (part._forward_hooks, part._forward_pre_hooks)]
        own = [Step(slot.owner, slot.key, None if slot.value() is NO_VALUE else slot.value()) for slot in slots]
        held = [each for each in _walk([*(step.value for step in own), *hooks]) if id(each) not in tree.ids]
        own += [Step(vars(part), "_modules", part._modules) for part in tree.ordered]  # torch's methods replace it
        own += (of_classes := [*_of_classes(slots)])
        held += [step.value for step in of_classes]
        inner = [*Outside(self.module).steps(self._outside), *chain(*map(within, held))]
        steps = [*own, *inner]
        in_dicts = [step for step in steps if isinstance(step.owner, dict)]
        in_objects = [step for step in steps if not isinstance(step.owner, dict) and _is_kept(step)]
        found = [step.value for step in (*in_dicts, *in_objects)]
        walked = [*_walk(found), *filter(None, hooks)]
        dicts = [each for each in walked if isinstance(each, dict)]
        others = [each for each in walked if isinstance(each, list | set | deque)]
        items = list(_each_item(dicts, others))
        tensors = [each for each in (*found, *items) if _counts_writes(each)]
        arrays = [each for each in (*found, *items) if _is_small_array(each)]
        self._seen = Seen(  # replaced as a whole: any thread may call
            tree,
            [step.owner for step in in_dicts],
            [step.key for step in in_dicts],
            [step.value for step in in_dicts],
            [step.owner for step in in_objects],
            [step.key for step in in_objects],
            [step.value for step in in_objects],
            inner,
            [step for step in steps if not isinstance(step.owner, dict) and not _is_kept(step)],
            dicts,
            others,
            [*map(dict.copy, dicts), *map(copy, others)],
            items,
            tensors,
            _marks(tensors),
            arrays,
            [each.tobytes() for each in arrays],
            [
                *(table for part in tree.parts.values() for table in _tables(part) if not table),
                *(table for table in hooks if not table),
                *(backward_hooks(hooked) if self.trains else ()),
                *(hooks_on_all_modules(self.trains) if self.hooks else ()),
            ],
            look_inside(slots, tree.ids),
            self.look_outside(slots),
            {id(part): [*map(here, forward_hooks(part))] for part in hooked},
        )

    def look(self) -> tuple[Tree, list[Slot]]:
        tree = _tree(self.module)
        return tree, list(_slots(tree, self._reads, self._as_region))

    def look_outside(self, slots: Iterable[Slot]) -> dict[str, Any]:
        """What each name outside the module is in this process, and what classes have for what their objects lack."""
        of_classes = {f"{step.owner.__qualname__}.{step.key}": here(step.value) for step in _of_classes(slots)}
        return of_classes | {name: here(value) for name, value in Outside(self.module).found(self._outside)}

    def check(self) -> None:
        """Raises BindError where something is another than it was."""
        seen, tree = self._seen, self._seen.tree
        try:
            is_same = (
                not any(map(is_not, map(dict.get, seen.owners, seen.keys), seen.values))
                and not (seen.objects and any(map(is_not, map(getattr, seen.objects, seen.names), seen.of_objects)))
                and not (seen.bound and any(attribute_of(step.owner, step.key) != step.value for step in seen.bound))
                and tree.tables == tree.copies
                and [list(part._modules) for part in tree.ordered] == tree.orders
                and not any(seen.empty)
                and list(map(type, tree.holders)) == tree.classes
                and list(map(len, tree.own)) == tree.lengths
                and [*seen.dicts, *seen.others] == seen.copies
                and not (seen.items and any(map(is_not, _each_item(seen.dicts, seen.others), seen.items)))
                and not (seen.tensors and _marks(seen.tensors) != seen.marks)
                and [each.tobytes() for each in seen.arrays] == seen.elements
            )
        except (RuntimeError, ValueError, TypeError, AttributeError):
            is_same = False  # a tensor in a number's place is neither equal nor unequal; an attribute may be gone
        if is_same:
            return
        from aotc.reads.watch_issues import changes

        if issues := changes(seen, self):
            raise BindError(
                f"the module of `{self.model}` is no longer as it was at the load",
                issues=tuple(issues[:SHOWN]),
                hint="set it back, or build the module as it is now; compiled.refresh() compares all of it anew",
            )
        self.refresh()


def look_inside(slots: Iterable[Slot], parts: Collection[int]) -> dict[str, Any]:
    """What each attribute is; nothing for the class's own forward, and for compiled code in a method's place, as after
    `module.method = aotc.load(…)`. A dataclass is its class: those of its attributes that are read are slots, too."""
    found = {}
    for slot in slots:
        path, key, part, value = slot.path, slot.key, slot.part, slot.value()
        if key == "forward":
            name_of = lambda held: f"the part {id(held):#x}" if id(held) in parts else ""  # noqa: E731
            found[path] = NO_VALUE if value in (None, NO_VALUE) else plain_forward(part, value, name_of)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            found[path] = f"a {type(value).__qualname__}"
        else:
            found[path] = NO_VALUE if value is NO_VALUE or is_compiled(value, part, key) else here(value, parts)
    return found


def here(value: Any, parts: Collection[int] = (), depth: int = 4) -> Any:
    """What a value is within this process, to compare it with a later one: plain, as far as that is possible; a
    function with its code, a partial one with its function; a tensor with the number of writes; a module by what is in
    it, unless it is one of `parts`, by their ids; an object of a class of the model's own by that class, since its
    attributes are compared; any other by its identity."""
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, FunctionType):
        cells = [each for each in map(contents_of, value.__closure__ or ()) if isinstance(each, FunctionType) and depth]
        return [plain_value(value), hash(value.__code__), *(here(each, parts, depth - 1) for each in cells)]
    if isinstance(value, partial):
        return [here(item, parts, depth - 1) for item in (value.func, value.args, value.keywords)]
    if isinstance(value, nn.Module):
        return f"the part {id(value):#x}" if id(value) in parts else digests_of(value)
    if isinstance(value, Tensor):
        known = (value.data_ptr(), _writes(value)) if _counts_writes(value) else ()
        return f"the tensor {id(value):#x} {known}"
    if depth and isinstance(container_of(value), list | tuple | deque | array):
        return [here(item, parts, depth - 1) for item in container_of(value)]
    if depth and (inner := _inner(container_of(value))) is not None:
        return {str(key): here(item, parts, depth - 1) for key, item in inner.items()}
    if (plain := plain_value(value)) is not NO_VALUE:
        return plain
    if isinstance(value, MethodWrapperType):  # of C, another object at each look
        return f"{value.__qualname__} of C"
    return f"a {type(value).__qualname__}" + ("" if is_anothers(type(value)) else f" at {id(value):#x}")


def _inner(value: Any) -> dict[Any, Any] | None:
    """What a dict, a set or a descriptor of the model's own holds, by its key."""
    if is_descriptor(value):
        return own_attributes(value)
    if isinstance(value, dict):
        return {**value, "by default": value.default_factory} if isinstance(value, defaultdict) else value
    return {hash(item): item for item in value} if isinstance(value, set | frozenset) else None


def _tree(module: nn.Module) -> Tree:
    parts = dict(module.named_modules())
    tables = [table for part in parts.values() for table in _tables(part) if table]
    own: list[Any] = [vars(part) for part in parts.values()]
    ids = frozenset(map(id, parts.values()))
    holders = [*parts.values(), *(held for part in parts.values() for _, held in objects_in(part))]
    copies, classes = [table.copy() for table in tables], [*map(type, holders)]
    ordered: list[nn.Module] = [part for part in parts.values() if isinstance(part, ORDERED) and len(part._modules) > 1]
    orders = [list(part._modules) for part in ordered]
    return Tree(parts, ids, holders, tables, copies, ordered, orders, classes, own, [*map(len, own)])


def _tables(part: nn.Module) -> tuple[dict[str, Any], ...]:
    return part._parameters, part._buffers, part._modules


def _slots(tree: Tree, reads: Collection[str], as_region: bool) -> Iterator[Slot]:
    names: dict[type, list[tuple[str, bool]]] = {}
    for path, part in tree.parts.items():
        prefix = f"{path}." if path else ""
        if "forward" in vars(part) and (path or not as_region):  # else its number of attributes grows
            yield Slot(f"{prefix}forward", vars(part), "forward", part)
        for inner, holder in (("", part), *objects_in(part)):
            if type(holder) not in names:
                slots = {name for cls in type(holder).__mro__ for name in slots_in(cls)}
                names[type(holder)] = [(name, name in slots) for name in attributes_in(holder, reads)]
            for name, is_slot in names[type(holder)]:
                owner = holder if is_slot else vars(holder)
                yield Slot(f"{prefix}{inner}.{name}" if inner else f"{prefix}{name}", owner, name, part)


def _of_classes(slots: Iterable[Slot]) -> Iterator[Step]:
    """The attributes of classes that stand for those that objects lack."""
    seen: set[tuple[type, str]] = set()
    for slot in slots:
        cls = type(slot.part)
        if slot.owner is not vars(slot.part) or (cls, slot.key) in seen:
            continue
        if slot.key not in slot.owner or is_compiled(slot.owner[slot.key], slot.part, slot.key):
            seen.add((cls, slot.key))
            if hasattr(cls, slot.key):
                yield Step(cls, slot.key, attribute_of(cls, slot.key))


def is_compiled(value: Any, part: nn.Module, method: str) -> bool:
    """Whether a value is the compiled code of the method whose place it has."""
    is_part_s = getattr(value, "is_compiled_code", False) is True and getattr(value, "module", None) is part
    return is_part_s and value.artifact.method == method


def _is_kept(step: Step) -> bool:
    """Whether each look at the attribute gives the same object."""
    return getattr(step.owner, step.key, None) is step.value


_writes = attrgetter("_version")


def _counts_writes(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference() and has_memory(value)


def _marks(tensors: Iterable[Tensor]) -> list[int]:
    return [*map(_writes, tensors), *map(Tensor.data_ptr, tensors)]


def _is_small_array(value: Any) -> bool:
    """Whether it is an array of NumPy's or Python's, which counts no writes, so small that each call may look at it."""
    is_array = isinstance(value, array) or (type(value).__module__ == "numpy" and getattr(value, "ndim", 0) > 0)
    return is_array and len(value.tobytes()) <= 4096


def _walk(values: Iterable[Any], depth: int = 4) -> Iterator[Any]:
    """The values, and those within lists, dicts and tuples among them."""
    for value in values:
        yield (found := container_of(value))
        if depth and isinstance(found, list | dict | tuple):
            yield from _walk(found.values() if isinstance(found, dict) else found, depth - 1)


def _each_item(dicts: Iterable[dict[Any, Any]], others: Iterable[Any]) -> Iterator[Any]:
    return chain(chain.from_iterable(map(dict.values, dicts)), chain.from_iterable(others))
