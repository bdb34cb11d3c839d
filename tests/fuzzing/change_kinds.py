"""Changes of a module and of what its forward reads, by kind; and the guide's table of what is noticed.

`KINDS` is the list: a kind's name, its row in the table, and a function that finds its changes of a module. What a
change is made of, is found in the module: its attributes, the objects in them, its classes, and the functions and names
that their code reads. A new value is drawn from a `random.Random`.
"""

from __future__ import annotations

import builtins
import copy
import enum
import functools
import itertools
import logging
import os
import sys
import threading
import types
import weakref
from array import array
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from fractions import Fraction
from random import Random
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune, stateless
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Entered = AbstractContextManager[Any]


@dataclass(frozen=True)
class Change:
    """One change. `make` makes it in this process, of a module; what it returns is entered around the load and calls.

    With `files`, the model's files are changed before they are imported anew: a service's, or a build's, next start.
    """

    where: str
    make: Callable[[nn.Module], Entered | None] = lambda module: None
    files: Mapping[str, Callable[[str], str]] | None = None


Changes = Callable[[nn.Module, Random], Iterator[Change]]


MOMENTS = ("build", "load", "after", "between")
"""Before the next build, before the load, after it, between two calls."""


@dataclass(frozen=True)
class Row:
    """A row of the guide's table, and what is done about its changes at each moment."""

    name: str
    title: str
    build: str
    load: str
    call: str


@dataclass(frozen=True)
class Kind:
    """A kind of change, as a part of a row of the guide's table.

    `forms` limits it to those, if it is not empty. At the moments in `blind` nothing can notice it, for the reason
    `why_not`: a silent difference is counted apart then, and is no fault.
    """

    name: str
    row: str
    changes: Changes
    forms: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    why_not: str = ""

    @property
    def title(self) -> str:
        return f"{self.row}: {self.name}".removeprefix(": ")


def unchanged(module: nn.Module, random: Random) -> Iterator[Change]:
    """What compiled code must compute as eager does, for else no change of it says anything."""
    yield Change("nothing")


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
    plain = (
        bool
        | int
        | float
        | complex
        | Fraction
        | str
        | None
        | enum.Enum
        | torch.dtype
        | Tensor
        | np.generic
        | np.ndarray
        | slice
    )
    if isinstance(value, plain | set | frozenset | functools.partial | SimpleNamespace | nn.Module):
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

    def changed(self, module: nn.Module, random: Random) -> Change:
        """The change to another value, which is drawn now, and made anew from each module's own."""
        seed = random.random()
        return Change(self.where, lambda module: self.set(module, another(self.get(module), Random(seed))))


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


def part_at(path: str) -> Callable[[nn.Module], nn.Module]:
    return lambda module: module.get_submodule(path)


def attribute_slots(module: nn.Module) -> Iterator[Slot]:
    """The attributes of the parts that are neither torch's own nor slots of tensors and modules."""
    for path, part in module.named_modules():
        for name in vars(part):
            if name not in _TORCHS:
                yield Slot(f"{path}.{name}".lstrip("."), part_at(path), name)


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
    values = [slot.get(module) for slot in (*attribute_slots(module), *inner_slots(module), *global_slots(module))]
    found = {type(value): None for value in values}
    return [cls for cls in found if is_ours(cls) and not issubclass(cls, nn.Module | tuple | enum.Enum)]


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


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
    todo += [slot.get(module) for slot in (*attribute_slots(module), *inner_slots(module))]
    while todo:
        for function in functions_of(todo.pop()):
            if id(function) in functions or not is_ours(function):
                continue
            functions[id(function)] = function
            todo += [cell.cell_contents for cell in function.__closure__ or ()]
            read = _names(function.__code__)
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
    return frozenset().union(*(_names(function.__code__) for function in code_of(module)[0].values()))


def read_values(module: nn.Module) -> list[Any]:
    return list(code_of(module)[1].values())


def global_slots(module: nn.Module) -> Iterator[Slot]:
    for place, name in code_of(module)[1]:
        yield Slot(f"{place}.{name}", lambda module, place=place: vars(sys.modules[place]), name, True)


def function_slots(module: nn.Module) -> Iterator[Slot]:
    """Functions themselves, those of an instance by the way to them."""
    for slot in (*attribute_slots(module), *inner_slots(module)):
        if isinstance(slot.get(module), FunctionType):
            yield slot
    for function in code_of(module)[0].values():
        if "<locals>.inner" not in function.__qualname__:
            yield Slot(function.__qualname__, lambda module, function=function: function)
    for slot in global_slots(module):
        if isinstance(slot.get(module), FunctionType) and is_ours(slot.get(module)):
            yield slot


# -- attributes -------------------------------------------------------------------------------------------------------


def _of_slots(
    slots: Callable[[nn.Module], Iterator[Slot]], wanted: Callable[[Slot, Any], bool] = lambda slot, value: True
) -> Changes:
    """Each such slot is given another value."""

    def changes(module: nn.Module, random: Random) -> Iterator[Change]:
        for slot in slots(module):
            value = slot.get(module)
            if changeable(value) and wanted(slot, value):
                yield slot.changed(module, random)

    return changes


def _is_private(slot: Slot, value: Any) -> bool:
    return str(slot.key).startswith("_")


def _grown(module: nn.Module, random: Random, slots: Callable[[nn.Module], Iterator[Slot]]) -> Iterator[Change]:
    """Containers that grow, shrink, or change their order."""
    for slot in slots(module):
        value = slot.get(module)
        if isinstance(value, list) and value:
            for name, grow in (
                ("append", lambda held: held.append(copy.copy(held[-1]))),
                ("pop", lambda held: held.pop()),
                ("reverse", lambda held: held.reverse()),
                ("insert", lambda held: held.insert(0, held[-1])),
            ):
                yield Change(f"{slot.where}.{name}", lambda module, slot=slot, grow=grow: grow(slot.get(module)))
        elif isinstance(value, dict) and value:
            first = next(iter(value))

            def add(held: dict[Any, Any], first: Any = first) -> None:
                held["more"] = held[first]

            def last(held: dict[Any, Any], first: Any = first) -> None:
                held[first] = held.pop(first)

            for name, grow in (("add", add), ("pop", lambda held, first=first: held.pop(first)), ("order", last)):
                yield Change(f"{slot.where} {name}", lambda module, slot=slot, grow=grow: grow(slot.get(module)))
        elif isinstance(value, set):
            yield Change(f"{slot.where}.clear", lambda module, slot=slot: slot.get(module).clear())


def grown_attributes(module: nn.Module, random: Random) -> Iterator[Change]:
    yield from _grown(module, random, lambda module: iter([*attribute_slots(module), *inner_slots(module)]))


def grown_globals(module: nn.Module, random: Random) -> Iterator[Change]:
    yield from _grown(module, random, lambda module: iter([*global_slots(module), *global_inner(module)]))


def hidden_attributes(module: nn.Module, random: Random) -> Iterator[Change]:
    """Attributes written into `__dict__`, and a `__dict__` that is replaced whole."""
    for slot in attribute_slots(module):
        value, seed = slot.get(module), random.random()
        if is_data(value):

            def write(module: nn.Module, slot: Slot = slot, seed: float = seed) -> None:
                vars(slot.holder(module))[slot.key] = another(slot.get(module), Random(seed))

            def replace(module: nn.Module, slot: Slot = slot, seed: float = seed) -> None:
                held = slot.holder(module)
                held.__dict__ = {**vars(held), slot.key: another(slot.get(module), Random(seed))}

            yield Change(f"{slot.where} in __dict__", write)
            yield Change(f"{slot.where} in another __dict__", replace)


def deleted_attributes(module: nn.Module, random: Random) -> Iterator[Change]:
    for slot in attribute_slots(module):
        yield Change(slot.where, lambda module, slot=slot: delattr(slot.holder(module), slot.key))


def added_attributes(module: nn.Module, random: Random) -> Iterator[Change]:
    """Attributes that hide those of classes, and one that forward may ask for."""
    for path, part in module.named_modules():
        held = {
            name: value for cls in reversed(type(part).__mro__) if is_ours(cls) for name, value in vars(cls).items()
        }
        for name, value in held.items():
            if not name.startswith("_") and is_data(value) and not hasattr(value, "__get__"):
                other = another(value, random)
                yield Change(f"{path}.{name}", lambda module, p=path, n=name, o=other: _put(module, p, n, o))
        yield Change(f"{path}.extra", lambda module, p=path: _put(module, p, "extra", 1.0))


def _put(module: nn.Module, path: str, name: str, value: Any) -> None:
    setattr(module.get_submodule(path), name, value)


def shared_objects(module: nn.Module, random: Random) -> Iterator[Change]:
    """Two attributes of one type are exchanged, or become one object."""
    slots = [slot for slot in attribute_slots(module) if changeable(slot.get(module))]
    for first, second in itertools.pairwise(slots):
        if type(first.get(module)) is type(second.get(module)):

            def exchange(module: nn.Module, first: Slot = first, second: Slot = second) -> None:
                one, other = first.get(module), second.get(module)
                first.set(module, other)
                second.set(module, one)

            yield Change(f"{first.where} ↔ {second.where}", exchange)


def _plain_tensors(*ways: tuple[str, Callable[[Tensor], Any]]) -> Changes:
    """Tensors that are neither parameters nor buffers, written to."""

    def changes(module: nn.Module, random: Random) -> Iterator[Change]:
        for slot in (*attribute_slots(module), *inner_slots(module), *global_slots(module), *class_slots(module)):
            if type(slot.get(module)) is Tensor:
                for way, write in ways:
                    yield Change(f"{slot.where} {way}", lambda m, slot=slot, write=write: _void(write(slot.get(m))))

    return changes


def _void(*values: Any) -> None:
    return None


# -- tensors and modules ----------------------------------------------------------------------------------------------


def _tensor_slots(module: nn.Module, kind: str) -> Iterator[tuple[str, str, Any]]:
    """Path of the part, name, and what is there: of `_parameters` or `_buffers`."""
    for path, part in module.named_modules():
        for name, value in getattr(part, kind).items():
            yield path, name, value


def _of_tensors(kind: str, wanted: bool, *ways: tuple[str, Callable[[nn.Module, str, Tensor], Any]]) -> Changes:
    """Ways to change each parameter or buffer that is there (`wanted`), or that is None."""

    def changes(module: nn.Module, random: Random) -> Iterator[Change]:
        for path, name, value in _tensor_slots(module, kind):
            for way, change in ways if (value is not None) is wanted else ():

                def make(module: nn.Module, path: str = path, name: str = name, change: Any = change) -> None:
                    part = module.get_submodule(path)
                    with torch.no_grad():
                        change(part, name, getattr(part, kind)[name])

                yield Change(f"{path}.{name} {way}".lstrip("."), make)

    return changes


def _replace(part: nn.Module, name: str, value: Tensor) -> None:
    setattr(part, name, another_tensor(value, Random(0)))


def _fill_slot(part: nn.Module, name: str, value: None) -> None:
    full = torch.full((getattr(part, "out_features", 8),), 2.5)
    setattr(part, name, nn.Parameter(full) if name in part._parameters else full)


def _set_data(part: nn.Module, name: str, value: Tensor) -> None:
    value.data = another_tensor(value, Random(1)).detach()


def _transpose(part: nn.Module, name: str, value: Tensor) -> None:
    value.data = value.data.t() if value.dim() == 2 and value.shape[0] == value.shape[1] else value.data.flip(0)


def _hidden_write(part: nn.Module, name: str, value: Tensor) -> None:
    value.data.copy_(another_tensor(value, Random(2)))


def _numpy_write(part: nn.Module, name: str, value: Tensor) -> None:
    array = value.detach().numpy()
    array[...] = another_tensor(value, Random(3)).detach().numpy()


def _written(part: nn.Module, name: str, value: Tensor) -> None:
    value.copy_(another_tensor(value, Random(4)))


def _cast(part: nn.Module, name: str, value: Tensor) -> None:
    if value.is_floating_point():
        value.data = value.data.double()


def _expanded(part: nn.Module, name: str, value: Tensor) -> None:
    value.data = value.data[:1].expand(value.shape)


def _unregistered(part: nn.Module, name: str, value: Tensor) -> None:
    held = part._parameters if name in part._parameters else part._buffers
    del held[name]
    object.__setattr__(part, name, another_tensor(value, Random(5)).detach())


def _none(part: nn.Module, name: str, value: Tensor) -> None:
    setattr(part, name, None)


def _frozen(part: nn.Module, name: str, value: Tensor) -> None:
    value.requires_grad_(not value.requires_grad) if value.is_floating_point() else None


class Scaled(Tensor):
    """A subclass whose functions give other results."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return -result if function in (F.linear, Tensor.mul, torch.mul) and isinstance(result, Tensor) else result


def _subclassed(part: nn.Module, name: str, value: Tensor) -> None:
    other = value.detach().clone().as_subclass(Scaled)
    setattr(part, name, nn.Parameter(other, value.requires_grad) if name in part._parameters else other)


def _tensor_hook(part: nn.Module, name: str, value: Tensor) -> None:
    if value.requires_grad:
        value.register_hook(lambda grad: grad * 3)


def _swapped(part: nn.Module, name: str, value: Tensor) -> None:
    torch.utils.swap_tensors(value, another_tensor(value, Random(10)))


def _set_memory(part: nn.Module, name: str, value: Tensor) -> None:
    value.set_(another_tensor(value, Random(11)).detach())


def _resized(part: nn.Module, name: str, value: Tensor) -> None:
    value.resize_(value.numel() + 8).resize_(value.shape).fill_(0.5)


def _in_another_dict(part: nn.Module, name: str, value: Tensor) -> None:
    kind = "_parameters" if name in part._parameters else "_buffers"
    setattr(part, kind, {**getattr(part, kind), name: another_tensor(value, Random(12))})


def _write_storage(part: nn.Module, name: str, value: Tensor) -> None:
    value.untyped_storage().copy_(another_tensor(value, Random(13)).detach().contiguous().untyped_storage())


def _write_each(part: nn.Module, name: str, value: Tensor) -> None:
    torch._foreach_mul_([value], -1) if value.is_floating_point() else None


def _write_in_inference(part: nn.Module, name: str, value: Tensor) -> None:
    with torch.inference_mode():
        value.copy_(another_tensor(value, Random(14)))


def _tied(module: nn.Module, random: Random) -> Iterator[Change]:
    """Two parameters of one shape become one, or what was one becomes two."""
    named = list(module.named_parameters(remove_duplicate=False))
    for index, (name, value) in enumerate(named):
        for other, second in named[index + 1 :]:
            if value is second:
                yield Change(f"{other} untied", lambda module, name=other: _set_parameter(module, name, None))
            elif value.shape == second.shape:
                yield Change(f"{other} = {name}", lambda module, n=other, o=name: _set_parameter(module, n, o))


def _set_parameter(module: nn.Module, name: str, other: str | None) -> None:
    path, _, key = name.rpartition(".")
    value = module.get_parameter(other) if other else nn.Parameter(module.get_parameter(name).detach() * -1)
    setattr(module.get_submodule(path), key, value)


def fused_step(module: nn.Module, random: Random) -> Iterator[Change]:
    """Steps of optimizers."""
    for name, fused in (("fused", True), ("plain", False)):
        for optimizer in (torch.optim.SGD, torch.optim.AdamW):

            def step(module: nn.Module, optimizer: Any = optimizer, fused: bool = fused) -> None:
                found = [one for one in module.parameters() if one.is_floating_point()]
                for one in found:
                    one.grad = torch.ones_like(one)
                optimizer(found, lr=0.1, fused=fused).step()
                for one in found:
                    one.grad = None

            if list(module.parameters()):
                yield Change(f"{optimizer.__name__} {name}", step)


def whole_moves(module: nn.Module, random: Random) -> Iterator[Change]:
    """What acts on all tensors of a module."""
    yield Change("double()", lambda module: _void(module.double()))
    yield Change("to(bfloat16)", lambda module: _void(module.to(torch.bfloat16)))
    yield Change("load_state_dict", lambda module: _void(module.load_state_dict(_other_state(module))))
    yield Change(
        "load_state_dict assign", lambda module: _void(module.load_state_dict(_other_state(module), assign=True))
    )
    yield Change("requires_grad_", lambda module: _void(module.requires_grad_(False)))
    yield Change("share_memory", lambda module: _void(module.share_memory()))


def _other_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: another_tensor(value, Random(6)).detach() for name, value in module.state_dict().items()}


def functional_calls(module: nn.Module, random: Random) -> Iterator[Change]:
    """Other tensors stand in the module's slots while it is called, as `torch.func.functional_call` puts them there."""

    def entered(module: nn.Module) -> Entered:
        named = dict(module.named_parameters())
        return stateless._reparametrize_module(module, {name: value.detach() * -1 for name, value in named.items()})

    if list(module.parameters()):
        yield Change("functional_call", entered)


def parametrizations_(module: nn.Module, random: Random) -> Iterator[Change]:
    """What computes a parameter from others."""

    class Zeroed(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value * 0.5

    for path, name, value in _tensor_slots(module, "_parameters"):
        if value is not None and value.dim() == 2:
            yield Change(
                f"{path}.{name} parametrized",
                lambda m, p=path, n=name: _void(parametrize.register_parametrization(m.get_submodule(p), n, Zeroed())),
            )
            yield Change(
                f"{path}.{name} weight_norm",
                lambda m, p=path, n=name: _void(nn.utils.weight_norm(m.get_submodule(p), n)),
            )
            yield Change(
                f"{path}.{name} pruned",
                lambda m, p=path, n=name: _void(prune.l1_unstructured(m.get_submodule(p), n, 0.75)),
            )
    for path, part in module.named_modules():
        if parametrize.is_parametrized(part):
            yield Change(
                f"{path} no longer parametrized",
                lambda m, p=path: _void(parametrize.remove_parametrizations(m.get_submodule(p), "weight")),
            )


def _module_slots(module: nn.Module) -> Iterator[tuple[str, str, nn.Module | None]]:
    for path, part in module.named_modules():
        for name, child in part._modules.items():
            yield path, name, child


def replaced_modules(module: nn.Module, random: Random) -> Iterator[Change]:
    """Another module in the place of one: without tensors, around the old one, the same class otherwise configured."""
    for path, name, child in _module_slots(module):
        if child is None:
            continue
        for way, new in (
            ("another", lambda child: nn.Softsign()),
            ("around it", Doubled),
            ("identity", lambda child: nn.Identity()),
            ("a copy, changed", _other_module),
        ):
            yield Change(
                f"{path}.{name} {way}".lstrip("."), lambda m, p=path, n=name, new=new: _replace_child(m, p, n, new)
            )


def _other_module(child: nn.Module) -> nn.Module:
    other = copy.deepcopy(child)
    slots = [slot for slot in attribute_slots(other) if is_data(slot.get(other))]
    for slot in slots[:1]:
        slot.set(other, another(slot.get(other), Random(7)))
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(-1)
    return other


def _replace_child(module: nn.Module, path: str, name: str, new: Callable[[nn.Module], Any]) -> None:
    part = module.get_submodule(path)
    part._modules[name] = new(part._modules[name])  # as setattr and item assignment of a container


def appearing_modules(module: nn.Module, random: Random) -> Iterator[Change]:
    """None becomes a module, a module None; containers grow, shrink, and change their order."""
    for path, name, child in _module_slots(module):
        new = (lambda child: nn.Sigmoid()) if child is None else (lambda child: None)
        yield Change(
            f"{path}.{name} {'filled' if child is None else 'None'}",
            lambda m, p=path, n=name, new=new: _replace_child(m, p, n, new),
        )
        if child is not None:
            yield Change(f"{path}.{name} deleted", lambda m, p=path, n=name: delattr(m.get_submodule(p), n))
    for slot in attribute_slots(module):
        if slot.get(module) is None:
            yield Change(f"{slot.where} filled", lambda m, slot=slot: slot.set(m, nn.Sigmoid()))
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part):
            for way, change in (
                ("append", lambda part: part.append(nn.Sigmoid())),
                ("insert", lambda part: part.insert(0, nn.Sigmoid())),
                ("del", lambda part: part.__delitem__(-1)),
                ("order", _turn_around),
                ("one twice", lambda part: part.append(part[0])),
            ):
                yield Change(f"{path} {way}", lambda m, p=path, c=change: _void(c(m.get_submodule(p))))
        elif isinstance(part, nn.ModuleDict):
            yield Change(f"{path} exchange", lambda m, p=path: _turn_around(m.get_submodule(p)))


def _turn_around(part: nn.Module) -> None:
    part._modules = dict(zip(part._modules, reversed(list(part._modules.values())), strict=True))


def added_modules(module: nn.Module, random: Random) -> Iterator[Change]:
    for path, _ in module.named_modules():
        yield Change(f"{path} + extra", lambda m, p=path: _void(m.get_submodule(p).add_module("extra", nn.Tanh())))


# -- classes and functions --------------------------------------------------------------------------------------------


def other_classes(module: nn.Module, random: Random) -> Iterator[Change]:
    """`__class__` of parts, of the root, and of objects in attributes."""
    for path, _ in module.named_modules():
        yield Change(
            f"{path}.__class__",
            lambda m, p=path: setattr(m.get_submodule(p), "__class__", _subclass(type(m.get_submodule(p)))),
        )
    for slot in (*attribute_slots(module), *inner_slots(module)):
        if is_ours(type(slot.get(module))) and type(slot.get(module)).__name__ in ("Power", "Adder", "Config"):
            yield Change(
                f"{slot.where}.__class__",
                lambda m, slot=slot: setattr(slot.get(m), "__class__", _subclass(type(slot.get(m)))),
            )


def _subclass(cls: type) -> type:
    names = [name for name in ("forward", "apply", "__call__") if name in dir(cls)]
    if issubclass(cls, nn.Module):
        names = ["forward"]

    def over(name: str) -> Any:
        return lambda self, *args, **kwargs: twice(getattr(cls, name)(self, *args, **kwargs))

    return type(cls.__name__, (cls,), {name: over(name) for name in names if hasattr(cls, name)})


def _class_functions(module: nn.Module) -> Iterator[Slot]:
    for slot in class_slots(module):
        if isinstance(slot.get(module), FunctionType | staticmethod | classmethod | property):
            yield slot
    for cls in object_classes(module):
        for name in ("__call__", "__float__", "__rmul__", "__getitem__", "__enter__", "__get__"):
            if name in vars(cls):
                yield Slot(f"{cls.__name__}.{name}", lambda module, cls=cls: cls, name)


def class_methods(module: nn.Module, random: Random) -> Iterator[Change]:
    """A method, a property, a static or a class method of a class is replaced."""

    def make(module: nn.Module, slot: Slot) -> None:
        old = slot.get(module)
        if isinstance(old, property):
            new: Any = property(doubled(old.fget))
        elif isinstance(old, staticmethod | classmethod):
            new = type(old)(doubled(old.__func__))
        else:
            new = doubled(old)
        slot.set(module, new)

    for slot in _class_functions(module):
        yield Change(slot.where, lambda module, slot=slot: make(module, slot))


def base_classes(module: nn.Module, random: Random) -> Iterator[Change]:
    """A class is put before the bases; a method of torch's classes is replaced; `__getattr__` and `__call__` appear."""

    class Before:
        def mix(self, x: Tensor, y: Tensor) -> Tensor:
            return x - y

    for cls in own_classes(module):
        if issubclass(cls, nn.Module) and cls.__bases__ != (nn.Module,):
            yield Change(f"{cls.__name__}.__bases__", lambda m, cls=cls: _bases(cls, Before))
        elif issubclass(cls, nn.Module):
            yield Change(
                f"{cls.__name__}.__call__", lambda m, cls=cls: setattr(cls, "__call__", doubled(nn.Module.__call__))
            )
    for torchs in {type(part) for part in module.modules() if type(part).__module__.startswith("torch.nn")}:
        if "forward" in vars(torchs):
            yield Change(
                f"{torchs.__name__}.forward", lambda m, cls=torchs: setattr(cls, "forward", doubled(cls.forward))
            )
    yield Change("nn.Module.__call__", lambda m: setattr(nn.Module, "__call__", doubled(nn.Module.__call__)))


def _bases(cls: type, before: type) -> None:
    cls.__bases__ = (before, *cls.__bases__)


def instance_methods(module: nn.Module, random: Random) -> Iterator[Change]:
    """Methods, forward among them, that are set on an instance."""
    for path, part in module.named_modules():
        names = {name for cls in type(part).__mro__ if is_ours(cls) for name in vars(cls)} | {"forward"}
        for name in sorted(names):
            if isinstance(getattr(part, name, None), MethodType) and not name.startswith("__"):

                def make(module: nn.Module, path: str = path, name: str = name) -> None:
                    part = module.get_submodule(path)
                    setattr(part, name, doubled(getattr(part, name)))

                yield Change(f"{path}.{name}".lstrip("."), make)
    for slot in (*attribute_slots(module), *inner_slots(module)):
        if hasattr(slot.get(module), "apply") and is_ours(type(slot.get(module))):
            yield Change(
                f"{slot.where}.apply", lambda m, slot=slot: setattr(slot.get(m), "apply", doubled(slot.get(m).apply))
            )


def default_arguments(module: nn.Module, random: Random) -> Iterator[Change]:
    for slot in function_slots(module):
        function, seed = slot.get(module), random.random()
        if function.__defaults__:
            yield Change(
                f"{slot.where}.__defaults__",
                lambda m, slot=slot, s=seed: setattr(
                    slot.get(m), "__defaults__", another(slot.get(m).__defaults__, Random(s))
                ),
            )
        if function.__kwdefaults__:
            yield Change(
                f"{slot.where}.__kwdefaults__",
                lambda m, slot=slot, s=seed: setattr(
                    slot.get(m), "__kwdefaults__", another(slot.get(m).__kwdefaults__, Random(s))
                ),
            )
            yield Change(
                f"{slot.where}.__kwdefaults__ in place",
                lambda m, slot=slot, s=seed: slot.get(m).__kwdefaults__.update(
                    another(slot.get(m).__kwdefaults__, Random(s))
                ),
            )


def closure_cells(module: nn.Module, random: Random) -> Iterator[Change]:
    for slot in function_slots(module):
        for index, cell in enumerate(slot.get(module).__closure__ or ()):
            value, seed = cell.cell_contents, random.random()
            if not changeable(value):
                continue

            def make(module: nn.Module, slot: Slot = slot, index: int = index, seed: float = seed) -> None:
                cell = slot.get(module).__closure__[index]
                cell.cell_contents = another(cell.cell_contents, Random(seed))

            yield Change(f"{slot.where} cell {slot.get(module).__code__.co_freevars[index]}", make)
            if isinstance(value, list):
                yield Change(
                    f"{slot.where} cell {index} entry",
                    lambda m, slot=slot, i=index: slot.get(m).__closure__[i].cell_contents.__setitem__(0, 9.0),
                )


def function_codes(module: nn.Module, random: Random) -> Iterator[Change]:
    """A function's `__code__` with another number in it."""
    for slot in function_slots(module):
        code, seed = slot.get(module).__code__, random.random()
        if any(type(const) is float for const in code.co_consts):

            def make(module: nn.Module, slot: Slot = slot, seed: float = seed) -> None:
                function = slot.get(module)
                consts = [
                    another(const, Random(seed)) if type(const) is float else const
                    for const in function.__code__.co_consts
                ]
                function.__code__ = function.__code__.replace(co_consts=tuple(consts))

            yield Change(f"{slot.where}.__code__", make)


def function_attributes(module: nn.Module, random: Random) -> Iterator[Change]:
    for slot in function_slots(module):
        for name, value in vars(slot.get(module)).items():
            if is_data(value):
                inner = Slot(f"{slot.where}.{name}", slot.get, name)
                yield inner.changed(module, random)


def global_inner(module: nn.Module) -> Iterator[Slot]:
    for slot in global_slots(module):
        yield from within(slot, slot.get(module))


def class_inner(module: nn.Module) -> Iterator[Slot]:
    for slot in class_slots(module):
        value = slot.get(module)
        if isinstance(value, list | dict) or (is_ours(type(value)) and not callable(value)):
            yield from within(slot, value)


def global_module_instances(module: nn.Module, random: Random) -> Iterator[Change]:
    """An nn.Module that is a global is replaced, or changed within."""
    for slot in global_slots(module):
        if isinstance(slot.get(module), nn.Module):
            yield slot.changed(module, random)
            for inner in attribute_slots(slot.get(module)):
                if is_data(inner.get(slot.get(module))):
                    yield Change(
                        f"{slot.where}.{inner.where}",
                        lambda m, s=slot, i=inner: i.set(s.get(m), another(i.get(s.get(m)), Random(8))),
                    )


def replaced_namespaces(module: nn.Module, random: Random) -> Iterator[Change]:
    """A Python module or a class in a global name becomes another one."""
    for slot in global_slots(module):
        value = slot.get(module)
        if isinstance(value, ModuleType) and value.__name__.startswith("change_"):

            def make(module: nn.Module, slot: Slot = slot) -> None:
                old = slot.get(module)
                new = SimpleNamespace(**vars(old))
                for name, held in vars(old).items():
                    if type(held) is float:
                        setattr(new, name, held * 2)
                slot.set(module, new)

            yield Change(slot.where, make)
        elif isinstance(value, type) and is_ours(value) and not issubclass(value, nn.Module | tuple | enum.Enum):
            yield Change(slot.where, lambda m, slot=slot: slot.set(m, _other_class(slot.get(m))))


def _other_class(cls: type) -> type:
    return type(
        cls.__name__, (cls,), {name: another(v, Random(9)) for name, v in vars(cls).items() if type(v) is float}
    )


def replaced_modules_of_python(module: nn.Module, random: Random) -> Iterator[Change]:
    """Another object in `sys.modules`, which an import within forward finds."""
    for name in sorted(read_names(module)):
        if name.startswith("change_") and name in sys.modules:

            def make(module: nn.Module, name: str = name) -> None:
                other = ModuleType(name)
                other.__dict__.update(vars(sys.modules[name]))
                for key, held in [*vars(other).items()]:
                    if type(held) is float:
                        setattr(other, key, held * 2)
                sys.modules[name] = other

            yield Change(f"sys.modules[{name!r}]", make)


def kept_states(module: nn.Module, random: Random) -> Iterator[Change]:
    """States of objects of Python's library: context variables, values of a thread, a logger's level, registries."""
    for slot in global_slots(module):
        value = slot.get(module)
        if isinstance(value, ContextVar):
            yield Change(f"{slot.where}.set", lambda m, slot=slot: _void(slot.get(m).set(2.5)))
        elif isinstance(value, threading.local):
            yield Change(f"{slot.where}.value", lambda m, slot=slot: setattr(slot.get(m), "value", 3.5))
        elif isinstance(value, logging.Logger):
            yield Change(f"{slot.where}.setLevel", lambda m, slot=slot: slot.get(m).setLevel(logging.DEBUG))
        elif hasattr(value, "registry"):
            yield Change(
                f"{slot.where}.register", lambda m, slot=slot: _void(slot.get(m).register(Tensor, lambda x: x * 9))
            )


def torch_functions(module: nn.Module, random: Random) -> Iterator[Change]:
    """Functions of torch, and of Python's own modules, that the code names, are replaced where they lie."""
    import math

    read = read_names(module)
    for part in module.modules():
        if type(part).__module__.startswith("torch.nn") and "forward" in vars(type(part)):
            read |= _names(type(part).forward.__code__)
    for space in (torch, F, math):
        for name in sorted(read & vars(space).keys()):
            value = vars(space)[name]
            if (
                callable(value)
                and not isinstance(value, type)
                and not name.startswith(("is_", "get_", "are_", "no_", "_"))
            ):
                yield Change(
                    f"{space.__name__}.{name}", lambda m, s=space, n=name: setattr(s, n, doubled(getattr(s, n)))
                )


def tensor_methods(module: nn.Module, random: Random) -> Iterator[Change]:
    read = read_names(module)
    for name in sorted(read & {"abs", "mul", "clamp", "sum", "view", "reshape", "to", "flatten"}):
        yield Change(f"Tensor.{name}", lambda m, n=name: setattr(Tensor, n, doubled(getattr(Tensor, n))))


def builtin_functions(module: nn.Module, random: Random) -> Iterator[Change]:
    """Builtins that the code names: hidden by a global name, or replaced."""
    for function in code_of(module)[0].values():
        for name in sorted(_names(function.__code__) & {"abs", "max", "sum", "len", "float", "int"}):
            space = function.__globals__
            yield Change(
                f"{space['__name__']}.{name}",
                lambda m, s=space, n=name: s.__setitem__(n, doubled(getattr(builtins, n))),
            )
            if name in ("abs", "max", "sum"):  # the others are used everywhere
                yield Change(f"builtins.{name}", lambda m, n=name: setattr(builtins, n, doubled(getattr(builtins, n))))


# -- hooks ------------------------------------------------------------------------------------------------------------


def _twice_hook(*args: Any) -> Any:
    return twice(args[-1])


def _pre_hook(module: nn.Module, args: Any) -> Any:
    return tuple(map(twice, args))


def _pre_hook_kwargs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(map(twice, args)), kwargs


def _grads(module: nn.Module, grads: Any, outputs: Any = None) -> Any:
    return tuple(None if grad is None else grad * 10 for grad in grads)


def forward_hooks(module: nn.Module, random: Random) -> Iterator[Change]:
    for path, _ in module.named_modules():
        for way, register in (
            ("hook", lambda part: part.register_forward_hook(_twice_hook)),
            ("hook always", lambda part: part.register_forward_hook(_twice_hook, always_call=True)),
            ("hook with kwargs", lambda part: part.register_forward_hook(_twice_hook, with_kwargs=True)),
            ("pre-hook", lambda part: part.register_forward_pre_hook(_pre_hook)),
            ("pre-hook with kwargs", lambda part: part.register_forward_pre_hook(_pre_hook_kwargs, with_kwargs=True)),
            ("hook first", lambda part: part.register_forward_hook(_twice_hook, prepend=True)),
        ):
            yield Change(f"{path} {way}", lambda m, p=path, r=register: _void(r(m.get_submodule(p))))
    for path, part in module.named_modules():
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if getattr(part, name):
                yield Change(f"{path} {name} cleared", lambda m, p=path, n=name: getattr(m.get_submodule(p), n).clear())
                new = _twice_hook if name == "_forward_hooks" else _pre_hook
                yield Change(
                    f"{path} {name} another",
                    lambda m, p=path, n=name, f=new: _another_hook(getattr(m.get_submodule(p), n), f),
                )


def _another_hook(hooks: dict[int, Any], new: Any) -> None:
    hooks[next(iter(hooks))] = new


def global_hooks(module: nn.Module, random: Random) -> Iterator[Change]:
    place = nn.modules.module
    yield Change("forward hook", lambda m: _void(place.register_module_forward_hook(_twice_hook)))
    yield Change(
        "forward hook always", lambda m: _void(place.register_module_forward_hook(_twice_hook, always_call=True))
    )
    yield Change("forward pre-hook", lambda m: _void(place.register_module_forward_pre_hook(_pre_hook)))


def backward_hooks(module: nn.Module, random: Random) -> Iterator[Change]:
    for path, _ in module.named_modules():
        yield Change(
            f"{path} full hook", lambda m, p=path: _void(m.get_submodule(p).register_full_backward_hook(_grads))
        )
        yield Change(
            f"{path} full pre-hook", lambda m, p=path: _void(m.get_submodule(p).register_full_backward_pre_hook(_grads))
        )
    place = nn.modules.module
    yield Change("all: full hook", lambda m: _void(place.register_module_full_backward_hook(_grads)))
    yield Change("all: full pre-hook", lambda m: _void(place.register_module_full_backward_pre_hook(_grads)))


def registration_hooks(module: nn.Module, random: Random) -> Iterator[Change]:
    """Hooks that do nothing in a call."""
    yield Change("state_dict hook", lambda m: _void(m.register_state_dict_post_hook(lambda *args: None)))
    yield Change(
        "parameter registration",
        lambda m: _void(nn.modules.module.register_module_parameter_registration_hook(lambda *args: None)),
    )


# -- modes and flags --------------------------------------------------------------------------------------------------


class NegatedFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        own = (torch.relu, torch.tanh, F.linear, Tensor.mul, Tensor.add, F.leaky_relu)
        return -result if function in own and isinstance(result, Tensor) else result


class NegatedOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        own = (torch.ops.aten.tanh.default, torch.ops.aten.mul.Tensor, torch.ops.aten.addmm.default)
        return -result if function in own else result


_ASKED = {"is_grad_enabled", "is_inference_mode_enabled", "requires_grad", "get_default_dtype", "is_autocast_enabled"}


def asked_modes(module: nn.Module, random: Random) -> Iterator[Change]:
    """Modes that forward asks for."""
    if read_names(module) & _ASKED:
        yield from grad_modes(module, random)
        yield from process_modes(module, random)
    if "mkldnn" in read_names(module):
        yield Change("mkldnn.enabled", lambda m: setattr(torch.backends.mkldnn, "enabled", False))
        yield Change("mkldnn.flags", lambda m: torch.backends.mkldnn.flags(enabled=False))


def grad_modes(module: nn.Module, random: Random) -> Iterator[Change]:
    yield Change("enable_grad", lambda m: torch.enable_grad())
    yield Change("no_grad", lambda m: torch.no_grad())
    yield Change("inference_mode", lambda m: torch.inference_mode())
    yield Change("set_grad_enabled for good", lambda m: _void(torch.set_grad_enabled(not torch.is_grad_enabled())))


def function_modes(module: nn.Module, random: Random) -> Iterator[Change]:
    yield Change("TorchFunctionMode", lambda m: NegatedFunctions())
    yield Change("TorchDispatchMode", lambda m: NegatedOperators())
    yield Change("DisableTorchFunction", lambda m: torch._C.DisableTorchFunctionSubclass())


def saved_hooks(module: nn.Module, random: Random) -> Iterator[Change]:
    yield Change("saved_tensors_hooks", lambda m: saved_tensors_hooks(lambda t: t * 2, lambda t: t))


def process_modes(module: nn.Module, random: Random) -> Iterator[Change]:
    yield Change("default dtype", lambda m: _void(torch.set_default_dtype(torch.float64)))
    yield Change("default device", lambda m: torch.device("meta"))
    yield Change("set_default_device", lambda m: _void(torch.set_default_device("meta")))
    yield Change("autocast", lambda m: torch.autocast("cpu", torch.bfloat16))
    yield Change("deterministic", lambda m: _void(torch.use_deterministic_algorithms(True)))
    yield Change("matmul precision", lambda m: _void(torch.set_float32_matmul_precision("medium")))
    yield Change("threads", lambda m: _void(torch.set_num_threads(2)))
    yield Change("anomaly", lambda m: torch.autograd.set_detect_anomaly(True, check_nan=False))


def training_flags(module: nn.Module, random: Random) -> Iterator[Change]:
    yield Change("train()", lambda m: _void(m.train(not m.training)))
    for path, part in module.named_modules():
        yield Change(
            f"{path}.train()", lambda m, p=path: _void(m.get_submodule(p).train(not m.get_submodule(p).training))
        )
        yield Change(
            f"{path}.training",
            lambda m, p=path: setattr(m.get_submodule(p), "training", not m.get_submodule(p).training),
        )
        if isinstance(part, nn.Dropout):
            yield Change(f"{path} drops all", lambda m, p=path: _drop_all(m.get_submodule(p)))


def _drop_all(part: nn.Dropout) -> None:
    part.p = 1.0
    part.train()


# -- the environment and files ----------------------------------------------------------------------------------------


def environment(module: nn.Module, random: Random) -> Iterator[Change]:
    for name, value in (("SUBJECT_RATE", "2.5"), ("SUBJECT_FLAG", "1"), ("SUBJECT_MODE", "x"), ("UNRELATED", "1")):
        if read_names(module) & {"environ", "getenv"}:
            yield Change(name, lambda m, n=name, v=value: os.environ.__setitem__(n, v))
            yield Change(f"{name} in another os.environ", lambda m, n=name, v=value: _another_environ({n: v}))
    if read_names(module) & {"environ"}:
        yield Change("os.getenv", lambda m: setattr(os, "getenv", lambda name, default=None: "x"))


def _another_environ(changed: dict[str, str]) -> None:
    os.environ = {**os.environ, **changed}  # type: ignore[assignment]  # noqa: B003 - the object itself is replaced


def environment_at_import(module: nn.Module, random: Random) -> Iterator[Change]:
    if "FROM_ENVIRONMENT" in read_names(module):
        yield Change("SUBJECT_AT_IMPORT", lambda m: os.environ.__setitem__("SUBJECT_AT_IMPORT", "3.5"), files={})


def data_files(module: nn.Module, random: Random) -> Iterator[Change]:
    """A file that is read at import."""
    number = random.choice((2.0, -3.5))
    if "SCALE" in read_names(module):
        yield Change("change_scale.txt", files={"change_scale.txt": lambda text: f"{number}\n"})


def files_in_forward(module: nn.Module, random: Random) -> Iterator[Change]:
    """A file that forward reads in each call."""
    if "read_text" in read_names(module):
        yield Change("change_scale.txt", files={"change_scale.txt": lambda text: "4.5\n"})


_EDITS: Sequence[tuple[str, str, str, str]] = (
    ("RATE", "change_subjects.py", "RATE = 0.625", "RATE = 1.125"),
    ("halved", "change_subjects.py", "return x * 0.5\n", "return x * 1.5\n"),
    ("slope", "change_subjects.py", "slope = 0.1", "slope = 0.8"),
    ("tanh", "change_subjects.py", "torch.tanh(x)", "torch.relu(x)"),
    ("TABLE", "change_subjects.py", '"shift": 0.25', '"shift": 2.25'),
    ("scale", "change_subjects.py", "scale, kind = 1.75", "scale, kind = 2.75"),
    ("alpha", "change_subjects.py", "self.on, self.none = 0.7", "self.on, self.none = 0.9"),
    ("GAIN", "change_helpers.py", "GAIN = 1.25", "GAIN = 3.25"),
    ("scaled", "change_helpers.py", "by: float = 1.5", "by: float = 2.5"),
    ("through", "change_helpers.py", "times = 3.0", "times = 4.0"),
    ("Tool", "change_helpers.py", "rate = 0.5", "rate = 5.5"),
    ("curved", "change_deep.py", "DEPTH = 0.75", "DEPTH = 2.75"),
    ("curved", "change_deep.py", "1.5]", "2.5]"),
    ("forward", "change_deep.py", '"""What', '"""All that'),
)


def source_files(module: nn.Module, random: Random) -> Iterator[Change]:
    """An edit of the model's file, or of one that it imports."""
    for name, file, old, new in _EDITS:
        if name in read_names(module) | {"forward"}:
            yield Change(f"{file}: {new.strip()}", files={file: lambda text, old=old, new=new: text.replace(old, new)})


# -- the kinds --------------------------------------------------------------------------------------------------------

_parameters, _buffers = "_parameters", "_buffers"
_ways: tuple[tuple[str, Callable[[nn.Module, str, Tensor], Any]], ...] = (
    ("replaced", _replace),
    ("data =", _set_data),
    ("transposed", _transpose),
    ("expanded", _expanded),
    ("cast", _cast),
    ("None", _none),
    ("unregistered", _unregistered),
    ("subclass", _subclassed),
    ("swapped", _swapped),
    ("set_", _set_memory),
    ("resized", _resized),
    ("in another dict", _in_another_dict),
)
_writes = (("written", _written), ("foreach", _write_each), ("in inference mode", _write_in_inference))
_hidden = (("hidden", _hidden_write), ("numpy", _numpy_write), ("storage", _write_storage))

ROWS = (
    Row("attributes", "attributes that forward read", "compiled anew", "`BindError`", "`BindError`"),
    Row("modules", "the tree of modules", "compiled anew", "`BindError`", "`BindError`"),
    Row("forms", "forms of tensors", "compiled anew", "`BindError` where the code cannot take it", "the same"),
    Row("values", "values of tensors", "frozen: compiled anew", "live: used; frozen: `BindError`", "the same"),
    Row("classes", "classes", "compiled anew", "`BindError`", "`BindError`"),
    Row("functions", "functions that forward ran", "compiled anew", "`BindError`", "`BindError`"),
    Row("names", "names of Python modules that forward read", "compiled anew", "`BindError`", "`BindError`"),
    Row("hooks", "hooks", "compiled anew", "`BindError`", "`BindError`"),
    Row("modes", "modes", "as the build sets them", "in a call", "`MissError`, or `BindError`"),
    Row("flags", "training flags", "as the build sets them", "`BindError`", "`MissError`"),
    Row("outside", "the environment and files", "compiled anew", "`BindError`", "`BindError`"),
)  # fmt: skip
"""The rows of the guide's table: what is done about a change before the next build, before the load, and in a call.
What eager computes may also be computed: not every change of what was read changes the result."""

CALLS = ("after", "between")

KINDS: tuple[Kind, ...] = (
    Kind("nothing", "", unchanged),
    # attributes
    Kind("public ones", "attributes", _of_slots(attribute_slots, lambda s, v: is_data(v) and not _is_private(s, v))),
    Kind("private ones", "attributes", _of_slots(attribute_slots, lambda s, v: is_data(v) and _is_private(s, v))),
    Kind("entries of containers, attributes of objects", "attributes", _of_slots(inner_slots, lambda s, v: is_data(v))),
    Kind(
        "functions and callable objects",
        "attributes",
        _of_slots(attribute_slots, lambda s, v: callable(v) and not is_data(v)),
    ),
    Kind("callables in containers", "attributes", _of_slots(inner_slots, lambda s, v: callable(v) and not is_data(v))),
    Kind("containers that grow, shrink, or change their order", "attributes", grown_attributes),
    Kind("deleted ones", "attributes", deleted_attributes),
    Kind("added ones, which hide those of a class", "attributes", added_attributes),
    Kind("two that are exchanged", "attributes", shared_objects),
    Kind("`__dict__`", "attributes", hidden_attributes),
    Kind(
        "tensors that are no buffers, written to",
        "attributes",
        _plain_tensors(
            ("add_", lambda one: one.add_(1)),
            ("set_", lambda one: one.set_(one * 2)),
            ("data =", lambda one: setattr(one, "data", one * 3)),
        ),
    ),
    Kind(
        "tensors that are no buffers, written to through `.data` or NumPy",
        "attributes",
        _plain_tensors(
            ("data", lambda one: one.data.mul_(3)), ("numpy", lambda one: np.negative(one.numpy(), one.numpy()))
        ),
        blind=CALLS,
        why_not="torch counts no version of the tensor",
    ),
    # modules
    Kind("replaced ones", "modules", replaced_modules),
    Kind("`None` ↔ module, containers that grow, shrink, or change their order", "modules", appearing_modules),
    Kind("added ones", "modules", added_modules),
    Kind("`__class__`", "modules", other_classes),
    Kind("`forward` and other methods on an instance", "modules", instance_methods),
    # tensors
    Kind(
        "parameters: replaced, another dtype, shape, strides or class, gone",
        "forms",
        _of_tensors(_parameters, True, *_ways),
    ),
    Kind("buffers: the same", "forms", _of_tensors(_buffers, True, *_ways)),
    Kind("parameters that were `None`", "forms", _of_tensors(_parameters, False, ("filled", _fill_slot))),
    Kind("buffers that were `None`", "forms", _of_tensors(_buffers, False, ("filled", _fill_slot))),
    Kind("all at once: `to`, `load_state_dict`", "forms", whole_moves),
    Kind("`requires_grad`", "forms", _of_tensors(_parameters, True, ("requires_grad", _frozen))),
    Kind("ties", "forms", _tied),
    Kind("parametrizations", "forms", parametrizations_),
    Kind("`torch.func.functional_call`", "forms", functional_calls),
    Kind("parameters written to", "values", _of_tensors(_parameters, True, *_writes)),
    Kind("buffers written to", "values", _of_tensors(_buffers, True, *_writes)),
    Kind("a step of an optimizer, fused or not", "values", fused_step),
    Kind(
        "written to through `.data`, NumPy or the storage",
        "values",
        _of_tensors(_parameters, True, *_hidden),
        blind=CALLS,
        why_not="torch counts no version of the tensor; live weights are read where they lie, frozen ones are not",
    ),
    # classes and functions
    Kind("attributes", "classes", _of_slots(class_slots, lambda s, v: is_data(v))),
    Kind("entries of containers in attributes", "classes", _of_slots(class_inner)),
    Kind("methods, properties, static and class methods", "classes", class_methods),
    Kind("bases, special methods, torch's own classes", "classes", base_classes),
    Kind("default arguments", "functions", default_arguments),
    Kind("closures", "functions", closure_cells),
    Kind("`__code__`", "functions", function_codes),
    Kind("attributes of functions", "functions", function_attributes),
    # names
    Kind("values", "names", _of_slots(global_slots, lambda s, v: is_data(v))),
    Kind(
        "entries of containers, attributes of objects in them",
        "names",
        _of_slots(global_inner, lambda s, v: is_data(v)),
    ),
    Kind("functions", "names", _of_slots(global_slots, lambda s, v: callable(v) and not isinstance(v, nn.Module))),
    Kind("containers that grow or shrink", "names", grown_globals),
    Kind("modules of torch", "names", global_module_instances),
    Kind("Python modules and classes", "names", replaced_namespaces),
    Kind("`sys.modules`", "names", replaced_modules_of_python),
    Kind("functions of torch", "names", torch_functions),
    Kind("methods of `Tensor`", "names", tensor_methods),
    Kind("builtins", "names", builtin_functions),
    Kind("context variables, thread-local values, levels of loggers, registries", "names", kept_states),
    # hooks
    Kind("on forward", "hooks", forward_hooks),
    Kind("on the forward of all modules", "hooks", global_hooks),
    Kind("on backward, with `train: true`", "hooks", backward_hooks, forms=("training",)),
    Kind(
        "of parameters, which autograd runs",
        "hooks",
        _of_tensors(_parameters, True, ("hook", _tensor_hook)),
        forms=("training",),
    ),
    Kind("of `state_dict` and registration, which no call runs", "hooks", registration_hooks),
    # modes
    Kind("those that forward asks for", "modes", asked_modes),
    Kind("gradients, inference mode", "modes", grad_modes),
    Kind("function and dispatch modes", "modes", function_modes),
    Kind("saved-tensor hooks", "modes", saved_hooks, forms=("training",)),
    Kind("default dtype and device, autocast, deterministic algorithms, matmul precision", "modes", process_modes),
    Kind("of the module or a part", "flags", training_flags),
    # outside
    Kind("variables that forward reads", "outside", environment),
    Kind("variables that an import reads", "outside", environment_at_import),
    Kind("data files that an import reads", "outside", data_files),
    Kind("source files", "outside", source_files),
    Kind(
        "files that forward reads",
        "outside",
        files_in_forward,
        blind=("build", "load", *CALLS),
        why_not="what a file or a socket gives is no value of the process",
    ),
)


# -- the guide's table ------------------------------------------------------------------------------------------------


def guide_table() -> str:
    """The table "what is noticed" of `aotc/runtime/GUIDE.md`, and the list of what cannot be."""
    lines = ["| what changes | before the next build | before the load | in a call |", "|---|---|---|---|"]
    for row in ROWS:
        kinds = "; ".join(kind.name for kind in KINDS if kind.row == row.name and len(kind.blind) < len(MOMENTS))
        lines.append(f"| **{row.title}:** {kinds} | {row.build} | {row.load} | {row.call} |")
    lines += ["", "What cannot be noticed:", ""]
    titles = {row.name: row.title for row in ROWS}
    for kind in KINDS:
        if kind.blind:
            when = "" if len(kind.blind) == len(MOMENTS) else " after the load"
            lines.append(f"- **{titles[kind.row]}: {kind.name}**{when}: {kind.why_not}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(guide_table(), end="")
