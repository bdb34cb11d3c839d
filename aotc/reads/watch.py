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
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, MethodWrapperType
from typing import Any, NamedTuple

from torch import Tensor, nn

from aotc.digest import canonical_json
from aotc.errors import BindError, Issue
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
    is_torchs,
    kind_of,
    kind_of_class,
    objects_in,
    own_attributes,
    plain_forward,
    plain_value,
    slots_in,
)
from aotc.reads.facts import IN_STEP, Facts, container_rows
from aotc.reads.outside import ENVIRONMENT, Outside, Step, attribute_of, changed_names, within
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
    """The module tree: its parts by their paths, the ids of parts, parameters and buffers, and what hides an entry of a
    part, by the entry's path."""

    parts: dict[str, nn.Module]
    ids: frozenset[int]
    hidden: dict[str, Any]


class Seen(NamedTuple):
    """What was found: the module tree, the facts that each call compares, and what tells whether a difference matters.

    `inner` are places within values. `inside` and `outside` have what the values were, by name; `unimported` are names
    whose Python modules were not imported; `orders` the names of parts in order, and `hooks_of` the hooks, of each
    module. `other_tables` are those of which `facts.tables` has no copies, with copies.
    """

    tree: Tree
    facts: Facts
    inner: list[Step]
    inside: dict[str, Any]
    outside: dict[str, Any]
    unimported: Set[str]
    orders: list[tuple[nn.Module, list[str]]]
    other_tables: list[tuple[dict[str, Any], dict[str, Any]]]
    hooks_of: dict[int, list[Any]]


class ModuleWatch:
    """A module, and what its code reads elsewhere, as they are now, with which later ones are compared."""

    def __init__(
        self,
        module: nn.Module,
        reads: Collection[str],
        outside: Mapping[str, Any],
        model: str,
        *,
        as_region: bool = False,
        trains: bool = False,
        hooks: bool = True,
    ) -> None:
        """`outside`: what these names were at the build; those that are imported after the load are compared with that.
        `as_region`: compiled code is the module's forward, and torch runs its hooks around it."""
        self.module, self.model, self.trains, self.hooks = module, model, trains, hooks
        self._reads, self._outside, self._as_region = reads, outside, as_region
        self.refresh()

    def refresh(self) -> None:
        """Record the present values."""
        tree, slots = self.look()
        parts = list(tree.parts.values())
        hooked = (parts[1:] if self._as_region else parts) if self.hooks else []
        hooks = [table for part in hooked for table in (part._forward_hooks, part._forward_pre_hooks)]
        ordered = [part for part in parts if isinstance(part, ORDERED) and len(part._modules) > 1]
        own = [Step(slot.owner, slot.key, None if slot.value() is NO_VALUE else slot.value()) for slot in slots]
        held = [each for each in _walk([*(step.value for step in own), *hooks]) if id(each) not in tree.ids]
        own += [Step(vars(part), "_modules", part._modules) for part in ordered]  # torch's methods replace it
        own += (of_classes := [*_of_classes(slots)])
        held += [step.value for step in of_classes]
        named = Outside(self.module)
        inner = [*named.steps(self._outside), *chain(*map(within, held))]
        unimported = named.unimported(self._outside)
        steps = [*own, *inner]
        in_dicts = [*unimported.values(), *(step for step in steps if isinstance(step.owner, dict))]
        kept = [step for step in steps if not isinstance(step.owner, dict) and _is_kept(step)]
        bound = [step for step in steps if not isinstance(step.owner, dict) and not _is_kept(step)]
        found = [step.value for step in (*in_dicts, *kept)]
        walked = [each for each in (*_walk(found), *filter(None, hooks)) if isinstance(each, dict | list | set | deque)]
        items = [item for each in walked for item in (each.values() if isinstance(each, dict) else each)]
        passed = tree.ids - {id(each) for each in _walk(step.value for step in inner)}  # to the code, by each call
        own_tables: list[dict[str, Any]] = [table for part in parts for table in _tables(part)]
        tables, lists, readers = container_rows([*filter(None, own_tables), *walked])
        holders = [
            *parts,
            *(held for part in parts for _, held in objects_in(part)),
            *(tensor for _, tensor in _tensors(tree)),
        ]
        mappings = [*map(vars, parts), *map(vars, {cls: None for part in parts for cls in type(part).__mro__[:-1]})]
        facts = Facts(
            slots=tuple((step.owner, step.key, step.value) for step in in_dicts),
            attributes=tuple((step.owner, step.key, step.value) for step in kept),
            tables=tuple(tables),
            lists=tuple(lists),
            empty=(
                *(table for table in own_tables if not table),
                *(table for table in hooks if not table),
                *(backward_hooks(hooked) if self.trains else ()),
                *(hooks_on_all_modules(self.trains) if self.hooks else ()),
            ),
            classes=tuple((holder, type(holder)) for holder in holders),
            lengths=tuple((mapping, len(mapping)) for mapping in mappings),
            written=tuple(
                (each, each._version, each.data_ptr())
                for each in (*found, *items)
                if _counts_writes(each) and id(each) not in passed
            ),
            readers=(
                *readers,
                *((partial(attribute_of, step.owner, step.key), step.value) for step in bound),
                *((each.tobytes, each.tobytes()) for each in (*found, *items) if _is_small_array(each)),
            ),
        )
        self._seen = Seen(  # replaced as a whole: any thread may call
            tree,
            facts,
            inner=inner,
            inside=look_inside(slots, tree.ids),
            outside=self.look_outside(slots),
            unimported=unimported.keys(),
            orders=[(part, list(part._modules)) for part in ordered],
            other_tables=[(table, dict(table)) for table in own_tables if type(table) not in IN_STEP],
            hooks_of={id(part): [*map(fingerprint, forward_hooks(part))] for part in hooked},
        )

    def look(self) -> tuple[Tree, list[Slot]]:
        tree = _tree(self.module)
        return tree, list(_slots(tree, self._reads, self._as_region))

    def look_outside(self, slots: Iterable[Slot]) -> dict[str, Any]:
        """Fingerprints of names outside the module, and of class attributes that objects have not set."""
        of_classes = {f"{step.owner.__qualname__}.{step.key}": fingerprint(step.value) for step in _of_classes(slots)}
        return of_classes | {name: fingerprint(value) for name, value in Outside(self.module).found(self._outside)}

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
        if issues := self._changes(seen):
            raise BindError(
                f"the module of `{self.model}` is no longer as it was at the load",
                issues=tuple(issues[:SHOWN]),
                hint="set it back, or build the module as it is now; compiled.refresh() compares all of it anew",
            )
        self.refresh()

    def _changes(self, seen: Seen) -> list[Issue]:
        """Issues for each place that differs from the values that were seen, and matters."""
        tree, slots = self.look()
        outside = self.look_outside(slots)
        imported = seen.unimported & outside.keys()
        named = [
            *_tree_changes(seen, tree),
            *_value_changes(seen.inside, look_inside(slots, tree.ids)),
            *_value_changes(seen.outside, {name: value for name, value in outside.items() if name not in imported}),
            *self._imported_changes(imported),
            *(_hook_changes(seen, tree, self.trains) if self.hooks else ()),
        ]
        return named or list(_inner_changes(seen.inner, tree))

    def _imported_changes(self, names: Iterable[str]) -> Iterator[Issue]:
        """Issues for names that were imported after the load, and are there what they were not at the build."""
        for name, built, here in changed_names(self._outside, Outside(self.module).values(names)):
            what = f"imported after the load, as {_shown(here)}; at the build it was {_shown(built)}"
            yield Issue(what, where=name, expected=_shown(built), actual=_shown(here))

    def _only_classes_differ(self, seen: Seen) -> bool:
        """Whether a class of the parts has got or lost attributes, none of which hides an entry: torch's compiler marks
        `nn.Module` so where eager calls it, as for a `torch.cond`."""
        of_parts = seen.facts.lengths[: len(seen.tree.parts)]
        try:
            return seen.facts._replace(lengths=of_parts).hold() and _tree(self.module).hidden == seen.tree.hidden
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return False


def look_inside(slots: Iterable[Slot], parts: Collection[int]) -> dict[str, Any]:
    """A fingerprint of each attribute; none of the class's own forward, nor of compiled code in a method's place, as in
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
            found[path] = NO_VALUE if value is NO_VALUE or is_compiled(value, part, key) else fingerprint(value, parts)
    return found


def fingerprint(value: Any, parts: Collection[int] = (), depth: int = 4) -> Any:
    """A value of this process in a form that a later one is compared with.

    Plain values are kept. A function is kept with its code, a partial one with its function, a tensor with its number
    of writes, a module with its contents, unless their ids are in `parts`. An object of a class of the model's own is
    its class, since its attributes are compared; any other object is its identity.
    """
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, FunctionType):
        cells = [each for each in map(contents_of, value.__closure__ or ()) if isinstance(each, FunctionType) and depth]
        return [plain_value(value), hash(value.__code__), *(fingerprint(each, parts, depth - 1) for each in cells)]
    if isinstance(value, partial):
        return [fingerprint(item, parts, depth - 1) for item in (value.func, value.args, value.keywords)]
    if isinstance(value, nn.Module):
        return f"the part {id(value):#x}" if id(value) in parts else digests_of(value)
    if isinstance(value, Tensor):
        known = (value.data_ptr(), value._version) if _counts_writes(value) and id(value) not in parts else ()
        return f"the tensor {id(value):#x} {known}"
    if depth and isinstance(container_of(value), list | tuple | deque | array):
        return [fingerprint(item, parts, depth - 1) for item in container_of(value)]
    if depth and (inner := _inner(container_of(value))) is not None:
        return {str(key): fingerprint(item, parts, depth - 1) for key, item in inner.items()}
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
    hidden = {_entry(path, name): by for path, part in parts.items() for name, by in hidden_entries(part)}
    tensors = [tensor for part in parts.values() for _, tensor in _tensors_of(part)]
    return Tree(parts, frozenset(map(id, (*parts.values(), *tensors))), hidden)


def _tensors(tree: Tree) -> Iterator[tuple[str, Tensor]]:
    for path, part in tree.parts.items():
        yield from ((_entry(path, name), tensor) for name, tensor in _tensors_of(part))


def _tensors_of(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    entries = (*part._parameters.items(), *part._buffers.items())
    return ((name, tensor) for name, tensor in entries if tensor is not None)


def _entry(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


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
    """Class attributes that are read where the object has none of that name."""
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


# -- what has changed -------------------------------------------------------------------------------------------------

_SWAPPED = "set it back, or call compiled.refresh(), which checks the new one"


def _tree_changes(seen: Seen, now: Tree) -> Iterator[Issue]:
    then = seen.tree
    classes = {id(holder): cls for holder, cls in seen.facts.classes}
    for holder, cls in seen.facts.classes:
        if not isinstance(holder, Tensor) and id(holder) not in then.ids and _does_otherwise(type(holder), cls):
            built, here = cls.__qualname__, type(holder).__qualname__
            yield Issue(f"the class of an object was {built} at the load, it is {here} now", "", built, here, _SWAPPED)
    for path in dict.fromkeys([*then.parts, *now.parts]):
        old, new = then.parts.get(path), now.parts.get(path)
        if old is not new:
            built, here = (type(part).__qualname__ if part is not None else "no module" for part in (old, new))
            what = f"the submodule was replaced after the load: a {built} then, a {here} now"
            yield Issue(what, where=path, expected=built, actual=here, hint=_SWAPPED)
        elif _does_otherwise(type(new), classes[id(old)]):
            built, here = classes[id(old)].__qualname__, type(new).__qualname__
            yield Issue(f"its class was {built} at the load, it is {here} now", path, built, here, _SWAPPED)
    for part, order in seen.orders:
        if [*part._modules] != order and {*part._modules} == {*order}:
            built, here = ", ".join(order), ", ".join(part._modules)
            yield Issue(f"the parts were {built} at the load, they are {here} now", "", built, here, _SWAPPED)
    yield from _hidden_changes(then, now)
    for tensor, cls in seen.facts.classes:
        if not isinstance(tensor, Tensor):
            continue
        if (built := kind_of_class("tensor", cls)) != (here := kind_of_class("tensor", type(tensor))):
            where = next((path for path, held in _tensors(now) if held is tensor), "")
            yield Issue(f"a {built} at the load, a {here} now", where, built, here, _SWAPPED)
    copies = {id(table): copy for table, copy in (*seen.facts.tables, *seen.other_tables)}
    for path, part in then.parts.items():
        for kind, table in zip(("parameter", "buffer", "module"), _tables(part), strict=True):
            before = copies.get(id(table), {})
            for name in before.keys() | table.keys():
                built, here = (_kind(kind, held.get(name, _ABSENT)) for held in (before, table))
                if built != here:
                    yield Issue(f"{built} at the load, {here} now", _entry(path, name), built, here, _SWAPPED)


def _hidden_changes(then: Tree, now: Tree) -> Iterator[Issue]:
    for path in dict.fromkeys([*then.hidden, *now.hidden]):
        built, here = (_text(tree.hidden[path]) if path in tree.hidden else "nothing" for tree in (then, now))
        if built != here:
            what = f"{built} hid this entry of the module at the load, {here} hides it now"
            yield Issue(what, where=path, expected=built, actual=here, hint=_SWAPPED)


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
            yield from _value_changes({str(key): fingerprint(built, tree.ids)}, {str(key): fingerprint(now, tree.ids)})


def _hook_changes(seen: Seen, tree: Tree, trains: bool) -> Iterator[Issue]:
    for path, part in tree.parts.items():
        built, now = seen.hooks_of.get(id(part)), [*map(fingerprint, forward_hooks(part))]
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
