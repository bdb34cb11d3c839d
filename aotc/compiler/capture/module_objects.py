"""Python objects that a module keeps between calls: attributes of its parts and of objects in them, lists, dicts.

torch.export restores a module's own attributes after its call of forward, but leaves fake tensors in other objects. So
all objects are recorded here, to find the changes of a call, and to restore them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

from aotc.digest import canonical_json
from aotc.reads.attributes import NO_VALUE, is_anothers, plain_value, slots_in

_ABSENT = object()
_TORCHS_OWN = frozenset(vars(nn.Module()))
_HOOKS = [name for name in vars(nn.Module()) if name.startswith("_forward_")]


class ObjectChange(NamedTuple):
    """The object at `path` was replaced by another one, or by an unequal number or text."""

    path: str
    holder: _Holder
    key: Any
    now: Any

    def is_made(self) -> bool:
        return not _same(self.before, self.holder.read().get(self.key, _ABSENT))

    @property
    def attribute(self) -> str:
        return self.path.partition("[")[0].rpartition(".")[2]

    @property
    def before(self) -> Any:
        return self.holder.before.get(self.key, _ABSENT)

    def is_of_submodule(self) -> bool:
        return isinstance(self.holder, _Submodules)

    def is_to_another_value(self) -> bool:
        return not _equal(self.before, self.now)

    def make(self) -> None:
        """Apply the change again."""
        contents = self.holder.read()
        contents.pop(self.key, None)
        self.holder.write(contents if self.now is _ABSENT else {**contents, self.key: self.now})


class KeptObjects:
    """A snapshot of all Python objects that a module keeps, by identity. Contents of tensors are not recorded."""

    def __init__(self, module: nn.Module) -> None:
        self._holders = list(_reached(module))
        self.has_changed = False
        """Whether `changes` ever found one. Changes that only `put_back` finds were made by torch.export."""
        self.changed: set[str] = set()
        """Names of the attributes that have ever changed to another value. (torch.export replaces lists and dicts by
        equal ones.)"""

    def changes(self) -> list[ObjectChange]:
        found = self._changes()
        self.has_changed = self.has_changed or bool(found)
        return found

    def put_back(self) -> None:
        for holder in {id(change.holder): change.holder for change in self._changes()}.values():
            holder.write(holder.before)

    def _changes(self) -> list[ObjectChange]:
        found = []
        for holder in self._holders:
            now = holder.read()
            for key in {**holder.before, **now}:
                if not _same(holder.before.get(key, _ABSENT), value := now.get(key, _ABSENT)):
                    found.append(ObjectChange(holder.path_of(key), holder, key, value))
        self.changed.update(change.attribute for change in found if change.is_to_another_value())
        return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, _Items) and isinstance(other, _Items):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


def _equal(one: Any, other: Any, depth: int = 4) -> bool:
    """Whether these are one object, containers of equal ones, or of one plain value."""
    if one is other:
        return True
    if depth and type(one) is type(other) and isinstance(one, list | tuple | dict) and len(one) == len(other):
        if isinstance(one, dict):
            return list(one) == list(other) and _equal([*one.values()], [*other.values()], depth - 1)
        return all(_equal(*items, depth - 1) for items in zip(one, other, strict=True))
    before, now = plain_value(one), plain_value(other)
    return before is not NO_VALUE and now is not NO_VALUE and canonical_json(before) == canonical_json(now)


class _Items(tuple[Any, ...]):
    """The items of a list or a set."""

    __slots__ = ()


class _Holder:
    """The attributes of a module, by their paths in the module's code, and their values at the snapshot."""

    def __init__(self, path: str, holder: Any) -> None:
        self.path, self.holder = path, holder
        self.before = self.read()

    def read(self) -> dict[Any, Any]:
        return dict(self.holder)

    def write(self, contents: dict[Any, Any]) -> None:
        self.holder.clear()
        self.holder.update(contents)

    def path_of(self, key: Any) -> str:
        return f"{self.path}.{key}" if self.path else str(key)


class _Submodules(_Holder):
    """The table of a module's own submodules."""


class _Dict(_Holder):
    def path_of(self, key: Any) -> str:
        return f"{self.path}[{key!r}]"


class _Whole(_Holder):
    """A list, a deque or a set."""

    def read(self) -> dict[Any, Any]:
        return {"": _Items(self.holder)}

    def write(self, contents: dict[Any, Any]) -> None:
        self.holder.clear()
        add = self.holder.update if isinstance(self.holder, set) else self.holder.extend
        add(contents[""])

    def path_of(self, key: Any) -> str:
        return self.path


class _Members(_Holder):
    """A class, or an object with slots."""

    def read(self) -> dict[Any, Any]:
        holder = self.holder
        if isinstance(holder, type):
            return {name: value for name, value in vars(holder).items() if _is_data(name, value)}
        names = [name for cls in type(holder).__mro__ for name in slots_in(cls)]
        return {name: getattr(holder, name) for name in names if hasattr(holder, name)}

    def write(self, contents: dict[Any, Any]) -> None:
        change = type if isinstance(self.holder, type) else object
        now = self.read()
        for name in now.keys() - contents.keys():
            change.__delattr__(self.holder, name)
        for name, value in contents.items():
            if now.get(name, _ABSENT) is not value:
                change.__setattr__(self.holder, name, value)


def _is_data(name: str, value: Any) -> bool:
    return not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")


def _reached(module: nn.Module) -> Iterator[_Holder]:
    """Each holder once, with the shortest of its paths."""
    waiting: deque[tuple[str, Any]] = deque(module.named_modules())
    seen: set[int] = set()
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, tuple):
            waiting += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        for holder in _holders_of(path, value):
            yield holder
            for key, item in holder.before.items():
                if isinstance(item, _Items):
                    waiting += [(f"{path}[{index}]", each) for index, each in enumerate(item)]
                elif not (isinstance(value, nn.Module) and key in _TORCHS_OWN):
                    waiting.append((holder.path_of(key), item))


def _holders_of(path: str, value: Any) -> Iterator[_Holder]:
    own = getattr(value, "__dict__", None)
    if isinstance(value, nn.Module):
        yield from (_Holder(path, held) for held in (own, value._parameters, value._buffers))
        yield _Submodules(path, value._modules)
        yield from (_Dict(f"{path}.{name}".removeprefix("."), vars(value)[name]) for name in _HOOKS)
        yield from (_Members(path, cls) for cls in type(value).__mro__ if is_anothers(cls))
    elif isinstance(value, dict):
        yield _Dict(path, value)
    elif isinstance(value, list | deque | set):
        yield _Whole(path, value)
    if isinstance(value, nn.Module | Tensor | type | ModuleType):
        return
    if is_anothers(type(value)) or isinstance(value, SimpleNamespace):
        if isinstance(own, dict):
            yield _Holder(path, own)
        if any(map(slots_in, type(value).__mro__)):
            yield _Members(path, value)
