"""Where a module and what its forward reads hold values, and other values to put there.

Found in the module itself: its attributes, the objects in them, its classes, and the functions and names that their
code reads. Of classes and functions, those of the subjects count.
"""

from __future__ import annotations

import copy
import enum
import functools
import sys
import types
import weakref
from array import array
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from fractions import Fraction
from random import Random
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# -- other values -----------------------------------------------------------------------------------------------------

_SWAPS = {"tanh": "relu", "relu": "sigmoid", "plain": "other", "plus": "minus", "second": "first", "first": "third"}
_DTYPES = {torch.float64: torch.float32, torch.float32: torch.float64}


def another(value: Any, random: Random) -> Any:
    """Another value of the same kind; a container, an object with one change within."""
    match value:
        case bool():
            return not value
        case enum.Enum():
            return random.choice([member for member in type(value) if member is not value])
        case int():
            return value + random.choice((1, 2, 3))
        case float():
            return random.choice((value * 2 + 0.5, -value - 1.0, value + 1.0))
        case str():
            return _SWAPS.get(value, f"{value}_")
        case None:
            return random.choice((0.5, 2.0, 1))
        case torch.dtype():
            return _DTYPES[value]
        case torch.device():
            return torch.device("meta")
        case Tensor():
            return another_tensor(value, random)
        case np.generic():
            return type(value)(another(value.item(), random))
        case np.ndarray():
            return value * 2 + 1
        case slice():
            return slice(0, 8, 2)
        case set() | frozenset():
            return random.choice((type(value)(), type(value)([*value, "more"])))
        case ChainMap():
            key = random.choice(list(value))
            return value.new_child({key: another(value[key], random)})
        case MappingProxyType():
            return MappingProxyType(another(dict(value), random))
        case bytearray():
            return bytearray((value[0] + 1, *value[1:]))
        case complex() | Fraction():
            return value * 3
        case dict() | UserDict() | deque() | array():
            key = random.choice(list(value if isinstance(value, Mapping) else range(len(value))))
            other = copy.copy(value)
            other[key] = another(value[key], random)
            return other
        case list() | tuple() if value:
            index = random.randrange(len(value))
            items = [*value[:index], another(value[index], random), *value[index + 1 :]]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        case functools.partial():
            return functools.partial(value.func, *value.args, **another(value.keywords, random))
        case nn.Module():
            return Doubled(value)
        case _ if is_ours(type(value)) or isinstance(value, SimpleNamespace):
            if is_dataclass(value):
                return another_object(value, random)
            return doubled(value) if callable(value) else another_object(value, random)
        case _ if callable(value):
            return doubled(value)
    raise TypeError(f"no other value of {value!r}")


def another_tensor(value: Tensor, random: Random) -> Tensor:
    with torch.no_grad():
        if value.dtype is torch.bool:
            return ~value
        if not value.is_floating_point():
            return value.flip(0)
        other = value.detach() * random.choice((2.0, -1.5)) + random.choice((0.0, 0.25))
    return nn.Parameter(other, value.requires_grad) if isinstance(value, nn.Parameter) else other


def another_object(value: Any, random: Random) -> Any:
    other = copy.deepcopy(value)
    slot = random.choice([slot for slot in within(Slot("", lambda module: other), other) if changeable(slot.get(None))])
    slot.set(None, another(slot.get(None), random))
    return other


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    def other(*args: Any, **kwargs: Any) -> Any:
        return twice(function(*args, **kwargs))

    return other


def twice(result: Any) -> Any:
    return result * 2 + 0.5 if isinstance(result, Tensor | float | int) and not isinstance(result, bool) else result


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return twice(self.inner(*args, **kwargs))


def is_ours(cls: type) -> bool:
    """Whether a class, or a function, is the subjects'."""
    return str(getattr(cls, "__module__", "")).startswith("change_")


def changeable(value: Any) -> bool:
    """Whether `another` knows another value, which it does not of what lies empty or is a class or a Python module."""
    if isinstance(value, list | tuple | Mapping | deque | array | bytearray):
        return len(value) > 0 and all(map(changeable, value.values() if isinstance(value, Mapping) else value))
    if isinstance(value, type | ModuleType):
        return False
    plain = bool | int | float | complex | Fraction | str | None | enum.Enum | torch.dtype | Tensor | slice
    arrays = np.generic | np.ndarray | set | frozenset
    if isinstance(value, plain | arrays | functools.partial | SimpleNamespace | nn.Module):
        return True
    return is_ours(type(value)) or callable(value)


def is_data(value: Any) -> bool:
    return changeable(value) and not isinstance(value, nn.Module | functools.partial) and not callable(value)


# -- places -----------------------------------------------------------------------------------------------------------

_TORCHS = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Slot:
    """A place that holds a value: an attribute of `holder(module)`, an item of it, or itself where there is no key."""

    where: str
    holder: Callable[[Any], Any]
    key: Any = None
    item: bool = False

    def get(self, module: Any) -> Any:
        held = self.holder(module)
        if self.key is None:
            return held
        if self.item:
            return held[self.key]
        return vars(held)[self.key] if isinstance(held, type) else getattr(held, self.key)

    def set(self, module: Any, value: Any) -> None:
        held = self.holder(module)
        if self.item:
            held[self.key] = value
        elif is_dataclass(held) and not isinstance(held, type):
            object.__setattr__(held, self.key, value)
        else:
            setattr(held, self.key, value)

    def change(self, module: Any, random: Random) -> None:
        self.set(module, another(self.get(module), random))


def within(outer: Slot, value: Any, depth: int = 4) -> Iterator[Slot]:
    """The slots in a container, or in an object, and in what they hold."""
    found: list[Slot] = []
    if isinstance(value, list | deque | array | np.ndarray):
        found = [Slot(f"{outer.where}[{index}]", outer.get, index, True) for index in range(len(value))]
    elif isinstance(value, dict):
        found = [Slot(f"{outer.where}[{key!r}]", outer.get, key, True) for key in value]
    elif isinstance(value, ChainMap | UserDict):
        inner = "maps" if isinstance(value, ChainMap) else "data"
        place = Slot(f"{outer.where}.{inner}", outer.get, inner)
        yield from within(place, getattr(value, inner), depth - 1)
    elif isinstance(value, weakref.ref):
        yield from within(Slot(f"{outer.where}()", lambda module: outer.get(module)()), value(), depth - 1)
    elif isinstance(value, nn.Module) and depth < 4:  # one that is not registered
        found = [Slot(f"{outer.where}.{name}", outer.get, name) for name in vars(value) if name not in _TORCHS]
    elif isinstance(value, functools.partial):
        where = f"{outer.where}.keywords"
        found = [Slot(f"{where}[{key!r}]", lambda held: outer.get(held).keywords, key, True) for key in value.keywords]
    elif (is_ours(type(value)) and not isinstance(value, nn.Module | enum.Enum)) or isinstance(value, SimpleNamespace):
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        found = [] if isinstance(value, tuple) else [Slot(f"{outer.where}.{name}", outer.get, name) for name in names]
    elif isinstance(value, tuple):  # of which no item can be replaced, but what lies in it
        for index, item in enumerate(value):
            inner = Slot(f"{outer.where}[{index}]", outer.get, index, True)
            yield from within(inner, item, depth - 1) if depth else ()
    for slot in found:
        yield slot
        if depth:
            held = value.keywords if isinstance(value, functools.partial) else value
            yield from within(slot, held[slot.key] if slot.item else getattr(held, slot.key), depth - 1)


def attribute_slots(module: nn.Module) -> Iterator[Slot]:
    """The attributes of the parts that are neither torch's own nor slots of tensors and modules."""
    for path, part in module.named_modules():
        for name in vars(part):
            if name not in _TORCHS:
                yield Slot(f"{path}.{name}".lstrip("."), lambda module, path=path: module.get_submodule(path), name)


def inner_slots(module: nn.Module) -> Iterator[Slot]:
    for slot in attribute_slots(module):
        yield from within(slot, slot.get(module))


def own_classes(module: nn.Module) -> list[type]:
    found = [cls for part in module.modules() for cls in type(part).__mro__ if is_ours(cls)]
    found += [value for value in read_values(module) if isinstance(value, type) and is_ours(value)]
    return list(dict.fromkeys([*found, *(type(cls) for cls in found if is_ours(type(cls)))]))


def class_slots(module: nn.Module) -> Iterator[Slot]:
    for cls in [*own_classes(module), *object_classes(module)]:
        for name, value in vars(cls).items():
            if not name.startswith("__") and not isinstance(value, types.MemberDescriptorType):
                yield Slot(f"{cls.__name__}.{name}", lambda module, cls=cls: cls, name)


def object_classes(module: nn.Module) -> list[type]:
    """The classes of the objects in attributes and globals."""
    values = [slot.get(module) for slot in (*held_slots(module), *global_slots(module))]
    found = {type(value): None for value in values}
    return [cls for cls in found if is_ours(cls) and not issubclass(cls, nn.Module | tuple | enum.Enum)]


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))


def functions_of(value: Any) -> list[FunctionType]:
    """The functions in a class, a descriptor, a bound method or a partial function; the function itself."""
    match value:
        case FunctionType():
            return [value]
        case staticmethod() | classmethod() | MethodType():
            return functions_of(value.__func__)
        case property():
            return functions_of(value.fget)
        case functools.partial():
            return functions_of(value.func)
        case type() if is_ours(value):
            held = [inner for inner in vars(value).values() if isinstance(inner, _HOLD_FUNCTIONS)]
            return [function for inner in held for function in functions_of(inner)]
    return functions_of(type(value)) if not isinstance(value, type) and is_ours(type(value)) else []


_HOLD_FUNCTIONS = FunctionType | staticmethod | classmethod | property


@functools.lru_cache(maxsize=2)
def code_of(module: nn.Module) -> tuple[dict[int, FunctionType], dict[tuple[str, str], Any]]:
    """The subjects' functions that the module's methods reach, and the names in Python modules that they read."""
    functions: dict[int, FunctionType] = {}
    names: dict[tuple[str, str], Any] = {}
    todo: list[Any] = [cls for part in module.modules() for cls in type(part).__mro__ if is_ours(cls)]
    todo += [slot.get(module) for slot in held_slots(module)]
    while todo:
        for function in functions_of(todo.pop()):
            if id(function) in functions or not is_ours(function):
                continue
            functions[id(function)] = function
            todo += [cell.cell_contents for cell in function.__closure__ or ()]
            read = names_in(function.__code__)
            spaces = [function.__globals__, *(vars(sys.modules[name]) for name in read if name.startswith("change_"))]
            while spaces:
                space = spaces.pop()
                for name in read & space.keys():
                    key = space["__name__"], name
                    if key not in names:
                        names[key] = space[name]
                        todo.append(space[name])
                    if isinstance(space[name], ModuleType) and space[name].__name__.startswith("change_"):
                        spaces.append(vars(space[name]))
                        todo.append(vars(space[name]).get("__getattr__"))
    return functions, names


@functools.lru_cache(maxsize=2)
def read_names(module: nn.Module) -> frozenset[str]:
    """All names in the code of the module: globals, attributes, methods."""
    return frozenset().union(*(names_in(function.__code__) for function in code_of(module)[0].values()))


def read_values(module: nn.Module) -> list[Any]:
    return list(code_of(module)[1].values())


def global_slots(module: nn.Module) -> Iterator[Slot]:
    for place, name in code_of(module)[1]:
        yield Slot(f"{place}.{name}", lambda module, place=place: vars(sys.modules[place]), name, True)


def function_slots(module: nn.Module) -> Iterator[Slot]:
    """Functions themselves, those of an instance by the way to them."""
    for slot in held_slots(module):
        if isinstance(slot.get(module), FunctionType):
            yield slot
    for function in code_of(module)[0].values():
        if "<locals>.inner" not in function.__qualname__:
            yield Slot(function.__qualname__, lambda module, function=function: function)
    for slot in global_slots(module):
        if isinstance(slot.get(module), FunctionType) and is_ours(slot.get(module)):
            yield slot


def global_inner(module: nn.Module) -> Iterator[Slot]:
    for slot in global_slots(module):
        yield from within(slot, slot.get(module))


def class_inner(module: nn.Module) -> Iterator[Slot]:
    for slot in class_slots(module):
        value = slot.get(module)
        if isinstance(value, list | dict) or (is_ours(type(value)) and not callable(value)):
            yield from within(slot, value)


def held_slots(module: nn.Module) -> Iterator[Slot]:
    yield from attribute_slots(module)
    yield from inner_slots(module)


def read_slots(module: nn.Module) -> Iterator[Slot]:
    yield from global_slots(module)
    yield from global_inner(module)
