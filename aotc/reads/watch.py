"""What compiled code depends on beside its weights, looked at in every call: the module tree, hooks, forward's reads.

The facts of a call (`aotc.reads.facts`): the tables of parameters, buffers and children; the classes of the parts and
of their tensors, and how many attributes each has; the attributes, global variables, defaults and cells of closures
that the captures read (`Variant.reads`, `Reads.outside`); what the lists and dicts among these hold, and how often the
tensors were written to. Where one does not hold, what differs, and whether that matters, is looked at by name.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
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
    hidden_entries,
    hooks_on_all_modules,
    is_anothers,
    is_descriptor,
    objects_in,
    own_attributes,
    plain_forward,
    plain_value,
    slots_in,
)
from aotc.reads.facts import Facts, container_rows
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
    tables that hold something, with copies; the parts in order, with their names; the classes of the holders and of
    the tensors; the attributes of each part and of each of their classes, and how many these are; what hides an entry
    of a table, by the entry's path."""

    parts: dict[str, nn.Module]
    ids: frozenset[int]
    holders: list[Any]
    tables: list[dict[str, Any]]
    copies: list[dict[str, Any]]
    ordered: list[nn.Module]
    orders: list[list[str]]
    classes: list[type]
    own: list[Mapping[str, Any]]
    tensors: list[Tensor]
    tensor_classes: list[type]
    hidden: dict[str, Any]


class Seen(NamedTuple):
    """What was found: the module tree, the facts that each call compares, and what tells whether a difference matters.

    `inner` are places within values. `inside` and `outside` have what the values were, by name, and `hooks_of` has the
    hooks of each module.
    """

    tree: Tree
    facts: Facts
    inner: list[Step]
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
        kept = [step for step in steps if not isinstance(step.owner, dict) and _is_kept(step)]
        bound = [step for step in steps if not isinstance(step.owner, dict) and not _is_kept(step)]
        found = [step.value for step in (*in_dicts, *kept)]
        walked = [each for each in (*_walk(found), *filter(None, hooks)) if isinstance(each, dict | list | set | deque)]
        items = [item for each in walked for item in (each.values() if isinstance(each, dict) else each)]
        tables, lists, readers = container_rows([*tree.tables, *walked])
        facts = Facts(
            slots=tuple((step.owner, step.key, step.value) for step in in_dicts),
            attributes=tuple((step.owner, step.key, step.value) for step in kept),
            tables=tuple(tables),
            lists=tuple(lists),
            empty=(
                *(table for part in tree.parts.values() for table in _tables(part) if not table),
                *(table for table in hooks if not table),
                *(backward_hooks(hooked) if self.trains else ()),
                *(hooks_on_all_modules(self.trains) if self.hooks else ()),
            ),
            classes=(
                *zip(tree.holders, tree.classes, strict=True),
                *zip(tree.tensors, tree.tensor_classes, strict=True),
            ),
            lengths=tuple((mapping, len(mapping)) for mapping in tree.own),
            written=tuple((each, each._version, each.data_ptr()) for each in (*found, *items) if _counts_writes(each)),
            readers=(
                *readers,
                *((partial(attribute_of, step.owner, step.key), step.value) for step in bound),
                *((each.tobytes, each.tobytes()) for each in (*found, *items) if _is_small_array(each)),
            ),
        )
        self._seen = Seen(  # replaced as a whole: any thread may call
            *(tree, facts, inner, look_inside(slots, tree.ids), self.look_outside(slots)),
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
        seen = self._seen
        try:
            is_same = seen.facts.hold()
        except (RuntimeError, ValueError, TypeError, AttributeError):
            is_same = False  # an attribute may be gone; what a reader gives may be neither equal nor unequal
        if is_same:
            return
        if self._only_classes_differ(seen):
            self.refresh()
            return
        from aotc.reads.watch_issues import changes

        if issues := changes(seen, self):
            raise BindError(
                f"the module of `{self.model}` is no longer as it was at the load",
                issues=tuple(issues[:SHOWN]),
                hint="set it back, or build the module as it is now; compiled.refresh() compares all of it anew",
            )
        self.refresh()

    def _only_classes_differ(self, seen: Seen) -> bool:
        """Whether a class of the parts has got or lost attributes, none of which hides an entry: torch's compiler marks
        `nn.Module` so where eager calls it, as for a `torch.cond`."""
        of_parts = seen.facts.lengths[: len(seen.tree.parts)]
        try:
            return seen.facts._replace(lengths=of_parts).hold() and _tree(self.module).hidden == seen.tree.hidden
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return False


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
        known = (value.data_ptr(), value._version) if _counts_writes(value) else ()
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
    of_classes = {cls: vars(cls) for part in parts.values() for cls in type(part).__mro__[:-1]}
    own: list[Mapping[str, Any]] = [*(vars(part) for part in parts.values()), *of_classes.values()]
    ids = frozenset(map(id, parts.values()))
    holders = [*parts.values(), *(held for part in parts.values() for _, held in objects_in(part))]
    copies, classes = [table.copy() for table in tables], [*map(type, holders)]
    ordered: list[nn.Module] = [part for part in parts.values() if isinstance(part, ORDERED) and len(part._modules) > 1]
    orders = [list(part._modules) for part in ordered]
    tensors = [held for part in parts.values() for table in _tables(part)[:2] for held in table.values()]
    tensors = [held for held in tensors if held is not None]
    hidden = {
        f"{path}.{name}".removeprefix("."): by for path, part in parts.items() for name, by in hidden_entries(part)
    }
    return Tree(
        *(parts, ids, holders, tables, copies, ordered, orders, classes, own),
        *(tensors, [*map(type, tensors)], hidden),
    )


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


def _counts_writes(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference() and has_memory(value)


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
