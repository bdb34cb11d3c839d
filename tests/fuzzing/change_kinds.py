"""The kinds of changes of a module and of what its forward reads; and the guide's table of what is noticed.

`KINDS` is the list: a kind's name, its row in the table, and a function that finds its changes of a module.
python tests/fuzzing/changes.py --table prints the table.
"""

from __future__ import annotations

import builtins
import copy
import enum
import itertools
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from random import Random
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from fuzzing.change_places import (
    Doubled,
    Slot,
    another,
    another_tensor,
    attribute_slots,
    changeable,
    class_inner,
    class_slots,
    code_of,
    doubled,
    function_slots,
    global_inner,
    global_slots,
    held_slots,
    inner_slots,
    is_data,
    is_ours,
    names_in,
    object_classes,
    own_classes,
    read_names,
    read_slots,
    twice,
    within,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune, stateless
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import aotc.optim

MOMENTS = ("build", "load", "after", "between")
"""Before the next build, before the load, after it, between two calls."""


@dataclass(frozen=True)
class Change:
    """One change: `make` makes it of a module in this process, `around` is entered around the load and each call.

    With `files`, the model's files are changed before they are imported anew: a service's, or a build's, next start.
    """

    where: str
    make: Callable[[nn.Module], Any] = lambda module: None
    around: Callable[[nn.Module], AbstractContextManager[Any]] | None = None
    files: Mapping[str, Callable[[str], str]] | None = None


Changes = Callable[[nn.Module, Random], Iterable[Change]]


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
    `why_not`; the guide names it `unseen`. A silent difference is counted apart then, and is not a fault.
    """

    name: str
    row: str
    changes: Changes
    forms: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    unseen: str = ""
    why_not: str = ""

    @property
    def title(self) -> str:
        return f"{self.row}: {self.name}".removeprefix(": ")


# -- changes at all places of a sort ----------------------------------------------------------------------------------


def at_once(*ways: tuple[str, Callable[[nn.Module], Any]]) -> Changes:
    """Of the module as a whole."""
    return lambda module, random: [Change(label, way) for label, way in ways]


def around_calls(**ways: Callable[[], AbstractContextManager[Any]]) -> Changes:
    return lambda module, random: [Change(label, around=lambda module, way=way: way()) for label, way in ways.items()]


def at_slots(
    slots: Callable[[nn.Module], Iterable[Slot]],
    *ways: tuple[str, Callable[[Slot, nn.Module, Random], Any]],
    wanted: Callable[[Any], bool] = lambda value: True,
) -> Changes:
    """Of each slot whose value is wanted; a change of it draws the same each time that it is made."""

    def changes(module: nn.Module, random: Random) -> Iterator[Change]:
        for slot in slots(module):
            if wanted(slot.get(module)):
                for label, way in ways:
                    yield _at_slot(slot, label, way, random.random())

    return changes


def _at_slot(slot: Slot, label: str, way: Callable[[Slot, nn.Module, Random], Any], seed: float) -> Change:
    return Change(f"{slot.where} {label}".strip(), lambda module: way(slot, module, Random(seed)))


def on_values(
    slots: Callable[[nn.Module], Iterable[Slot]], wanted: Callable[[Any], bool], *ways: tuple[str, Any]
) -> Changes:
    """As `at_slots`, of values that are changed in their places."""
    return at_slots(slots, *((label, partial(_on_value, way)) for label, way in ways), wanted=wanted)


def _on_value(way: Callable[[Any], Any], slot: Slot, module: nn.Module, random: Random) -> None:
    way(slot.get(module))


def other_values(slots: Callable[[nn.Module], Iterable[Slot]], wanted: Callable[[Any], bool] = is_data) -> Changes:
    """Each slot is given another value."""
    return at_slots(slots, ("", Slot.change), wanted=lambda value: changeable(value) and wanted(value))


def at_parts(
    *ways: tuple[str, Callable[[Any], Any]], wanted: Callable[[nn.Module], bool] = lambda part: True
) -> Changes:
    """Of the module and each part of it."""
    return lambda module, random: [
        Change(f"{path or 'root'} {label}", lambda module, path=path, way=way: way(module.get_submodule(path)))
        for path, part in module.named_modules()
        if wanted(part)
        for label, way in ways
    ]


def at_children(wanted: bool, *ways: tuple[str, Callable[[Any], Any]]) -> Changes:
    """Of each slot for a module that is there (`wanted`), or that is None: what a way gives is put there."""

    def put(module: nn.Module, path: str, name: str, way: Callable[[Any], Any]) -> None:
        held = module.get_submodule(path)._modules
        held[name] = way(held[name])

    return lambda module, random: [
        Change(f"{path}.{name} {label}".lstrip("."), partial(put, path=path, name=name, way=way))
        for path, part in module.named_modules()
        for name, child in part._modules.items()
        if (child is not None) is wanted
        for label, way in ways
    ]


def at_tensors(kind: str, wanted: bool, *ways: tuple[str, Callable[[nn.Module, str, Any], Any]]) -> Changes:
    """Of each parameter or buffer that is there (`wanted`), or that is None."""

    def make(module: nn.Module, path: str, name: str, way: Callable[[nn.Module, str, Any], Any]) -> None:
        part = module.get_submodule(path)
        with torch.no_grad():
            way(part, name, getattr(part, kind)[name])

    return lambda module, random: [
        Change(f"{path}.{name} {label}".lstrip("."), partial(make, path=path, name=name, way=way))
        for path, part in module.named_modules()
        for name, value in getattr(part, kind).items()
        if (value is not None) is wanted
        for label, way in ways
    ]


def together(*changes: Changes) -> Changes:
    return lambda module, random: itertools.chain.from_iterable(found(module, random) for found in changes)


def where_read(names: set[str], changes: Changes) -> Changes:
    """Only of modules whose code has one of these names."""
    return lambda module, random: changes(module, random) if names & read_names(module) else []


# -- attributes -------------------------------------------------------------------------------------------------------


def of_name(private: bool) -> Callable[[nn.Module], Iterator[Slot]]:
    return lambda module: (slot for slot in attribute_slots(module) if str(slot.key).startswith("_") is private)


def is_callable(value: Any) -> bool:
    return callable(value) and not is_data(value)


def grown(slots: Callable[[nn.Module], Iterable[Slot]]) -> Changes:
    """Containers that grow, shrink, or change their order."""

    def first_again(held: dict[Any, Any]) -> None:
        held["more"] = held[next(iter(held))]

    def first_last(held: dict[Any, Any]) -> None:
        name = next(iter(held))
        held[name] = held.pop(name)

    return together(
        on_values(
            slots,
            lambda value: isinstance(value, list) and len(value) > 0,
            ("append", lambda held: held.append(copy.copy(held[-1]))),
            ("insert", lambda held: held.insert(0, held[-1])),
            ("pop", lambda held: held.pop()),
            ("reverse", lambda held: held.reverse()),
        ),
        on_values(
            slots,
            lambda value: isinstance(value, dict) and len(value) > 0,
            ("add", first_again),
            ("order", first_last),
            ("pop", lambda held: held.pop(next(iter(held)))),
        ),
        on_values(slots, lambda value: isinstance(value, set), ("clear", lambda held: held.clear())),
    )


def write_dict(slot: Slot, module: nn.Module, random: Random) -> None:
    vars(slot.holder(module))[slot.key] = another(slot.get(module), random)


def replace_dict(slot: Slot, module: nn.Module, random: Random) -> None:
    held = slot.holder(module)
    held.__dict__ = {**vars(held), slot.key: another(slot.get(module), random)}


def delete(slot: Slot, module: nn.Module, random: Random) -> None:
    delattr(slot.holder(module), slot.key)


def added_attributes(module: nn.Module, random: Random) -> Iterator[Change]:
    """Attributes that hide those of classes, and one that forward may ask for."""
    for path, part in module.named_modules():
        added = {"extra": 1.0}
        for cls in reversed(type(part).__mro__):
            for name, value in vars(cls).items() if is_ours(cls) else ():
                if not name.startswith("_") and is_data(value) and not hasattr(value, "__get__"):
                    added[name] = another(value, random)
        for name, value in added.items():
            yield Change(f"{path}.{name}", lambda m, p=path, n=name, v=value: setattr(m.get_submodule(p), n, v))


def exchanged_attributes(module: nn.Module, random: Random) -> Iterator[Change]:
    slots = [slot for slot in attribute_slots(module) if changeable(slot.get(module))]
    for first, second in itertools.pairwise(slots):
        if type(first.get(module)) is type(second.get(module)):

            def exchange(module: nn.Module, first: Slot = first, second: Slot = second) -> None:
                one, other = first.get(module), second.get(module)
                first.set(module, other)
                second.set(module, one)

            yield Change(f"{first.where} ↔ {second.where}", exchange)


def plain_tensors(*ways: tuple[str, Callable[[Tensor], Any]]) -> Changes:
    """Tensors that are neither parameters nor buffers, written to."""
    return on_values(
        lambda module: [*held_slots(module), *global_slots(module), *class_slots(module)],
        lambda value: type(value) is Tensor,
        *ways,
    )


# -- tensors ----------------------------------------------------------------------------------------------------------


def held_by(part: nn.Module, name: str) -> dict[str, Any]:
    return part._parameters if name in part._parameters else part._buffers


def replaced(part: nn.Module, name: str, value: Tensor) -> None:
    setattr(part, name, another_tensor(value, Random(0)))


def filled(part: nn.Module, name: str, value: None) -> None:
    full = torch.full((getattr(part, "out_features", 8),), 2.5)
    setattr(part, name, nn.Parameter(full) if name in part._parameters else full)


def other_data(part: nn.Module, name: str, value: Tensor) -> None:
    value.data = another_tensor(value, Random(1)).detach()


def transposed(part: nn.Module, name: str, value: Tensor) -> None:
    value.data = value.data.t() if value.dim() == 2 and value.shape[0] == value.shape[1] else value.data.flip(0)


def expanded(part: nn.Module, name: str, value: Tensor) -> None:
    value.data = value.data[:1].expand(value.shape)


def cast(part: nn.Module, name: str, value: Tensor) -> None:
    value.data = value.data.double() if value.is_floating_point() else value.data


def unregistered(part: nn.Module, name: str, value: Tensor) -> None:
    del held_by(part, name)[name]
    object.__setattr__(part, name, another_tensor(value, Random(5)).detach())


class Scaled(Tensor):
    """A subclass whose functions give other results."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return -result if function in (F.linear, Tensor.mul, torch.mul) and isinstance(result, Tensor) else result


def subclassed(part: nn.Module, name: str, value: Tensor) -> None:
    other = value.detach().clone().as_subclass(Scaled)
    setattr(part, name, nn.Parameter(other, value.requires_grad) if name in part._parameters else other)


def in_another_dict(part: nn.Module, name: str, value: Tensor) -> None:
    kind = "_parameters" if name in part._parameters else "_buffers"
    setattr(part, kind, {**getattr(part, kind), name: another_tensor(value, Random(12))})


def written_in_inference(part: nn.Module, name: str, value: Tensor) -> None:
    with torch.inference_mode():
        value.copy_(another_tensor(value, Random(14)))


def numpy_written(part: nn.Module, name: str, value: Tensor) -> None:
    value.detach().numpy()[...] = another_tensor(value, Random(3)).detach().numpy()


def storage_written(part: nn.Module, name: str, value: Tensor) -> None:
    value.untyped_storage().copy_(another_tensor(value, Random(13)).detach().contiguous().untyped_storage())


FORMS_OF_TENSORS = (
    ("replaced", replaced),
    ("data =", other_data),
    ("transposed", transposed),
    ("expanded", expanded),
    ("cast", cast),
    ("None", lambda part, name, value: setattr(part, name, None)),
    ("unregistered", unregistered),
    ("subclass", subclassed),
    ("swapped", lambda part, name, value: torch.utils.swap_tensors(value, another_tensor(value, Random(10)))),
    ("set_", lambda part, name, value: value.set_(another_tensor(value, Random(11)).detach())),
    ("resized", lambda part, name, value: value.resize_(value.numel() + 8).resize_(value.shape).fill_(0.5)),
)
WRITES = (
    ("written", lambda part, name, value: value.copy_(another_tensor(value, Random(4)))),
    ("foreach", lambda part, name, value: torch._foreach_mul_([value], -1) if value.is_floating_point() else None),
    ("in inference mode", written_in_inference),
)
HIDDEN_WRITES = (
    (".data", lambda part, name, value: value.data.copy_(another_tensor(value, Random(2)))),
    ("numpy", numpy_written),
    ("storage", storage_written),
)


def tied(module: nn.Module, random: Random) -> Iterator[Change]:
    """Two parameters of one shape become one, or what was one becomes two."""

    def put(module: nn.Module, name: str, other: str) -> None:
        path, _, key = name.rpartition(".")
        value = module.get_parameter(other)
        setattr(module.get_submodule(path), key, nn.Parameter(value.detach() * -1) if name == other else value)

    named = list(module.named_parameters(remove_duplicate=False))
    for (name, value), (other, second) in itertools.combinations(named, 2):
        if value is second:
            yield Change(f"{other} untied", partial(put, name=other, other=other))
        elif value.shape == second.shape:
            yield Change(f"{other} = {name}", partial(put, name=other, other=name))


def step(module: nn.Module, optimizer: Any, **options: Any) -> None:
    found = [one for one in module.parameters() if one.is_floating_point()]
    for one in found:
        one.grad = torch.ones_like(one)
    optimizer(found, lr=0.1, **options).step()
    for one in found:
        one.grad = None


def steps(module: nn.Module, random: Random) -> Iterator[Change]:
    for name in ("SGD", "AdamW") if list(module.parameters()) else ():
        theirs = getattr(torch.optim, name)
        for fused in (True, False):
            yield Change(f"{name} fused={fused}", partial(step, optimizer=theirs, fused=fused))
        yield Change(f"aotc.optim.{name}", lambda m, name=name: step(m, getattr(aotc.optim, name)))


def other_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: another_tensor(value, Random(6)).detach() for name, value in module.state_dict().items()}


def functional_call(module: nn.Module) -> AbstractContextManager[Any]:
    """As `torch.func.functional_call` puts other tensors into the module's slots."""
    named = dict(module.named_parameters())
    return stateless._reparametrize_module(module, {name: value.detach() * -1 for name, value in named.items()})


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, value: Tensor) -> Tensor:
        return value * 0.5


def computed(way: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module, str, Tensor], Any]:
    return lambda part, name, value: way(part, name) if value.dim() == 2 else None


# -- modules, classes and functions -----------------------------------------------------------------------------------


def other_module(child: nn.Module) -> nn.Module:
    """A copy that computes something else."""
    other = copy.deepcopy(child)
    for slot in [slot for slot in attribute_slots(other) if is_data(slot.get(other))][:1]:
        slot.change(other, Random(7))
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(-1)
    return other


def turn_around(part: nn.Module) -> None:
    part._modules = dict(zip(part._modules, reversed(list(part._modules.values())), strict=True))


def deleted_child(module: nn.Module, random: Random) -> Iterator[Change]:
    for path, part in module.named_modules():
        for name in part._modules:
            yield Change(f"{path}.{name} deleted", lambda m, p=path, n=name: delattr(m.get_submodule(p), n))


def subclass(cls: type) -> type:
    """A class of the same name whose methods compute something else."""
    wanted = ("forward",) if issubclass(cls, nn.Module) else ("apply", "__call__", "__float__")
    return type(cls.__name__, (cls,), {name: doubled(getattr(cls, name)) for name in wanted if hasattr(cls, name)})


def other_class(held: Any) -> None:
    held.__class__ = subclass(type(held))


SPECIAL = ("__call__", "__float__", "__rmul__", "__getitem__", "__enter__", "__get__", "__getattr__")


def method_slots(module: nn.Module) -> Iterator[Slot]:
    for slot in class_slots(module):
        if isinstance(slot.get(module), FunctionType | staticmethod | classmethod | property):
            yield slot
    for cls in [*own_classes(module), *object_classes(module)]:
        for name in SPECIAL:
            if isinstance(vars(cls).get(name), FunctionType):
                yield Slot(f"{cls.__name__}.{name}", lambda module, cls=cls: cls, name)


def replace_method(slot: Slot, module: nn.Module, random: Random) -> None:
    old = slot.get(module)
    if isinstance(old, property):
        slot.set(module, property(doubled(old.fget)))
    elif isinstance(old, staticmethod | classmethod):
        slot.set(module, type(old)(doubled(old.__func__)))
    else:
        slot.set(module, doubled(old))


class Before:
    """A class that is put before the bases of others."""

    def mix(self, x: Tensor, y: Tensor) -> Tensor:
        return x - y


def base_classes(module: nn.Module, random: Random) -> Iterator[Change]:
    def put_before(module: nn.Module, cls: type) -> None:
        cls.__bases__ = (Before, *cls.__bases__)

    def double(module: nn.Module, cls: type, name: str) -> None:
        setattr(cls, name, doubled(getattr(cls, name)))

    for cls in own_classes(module):
        if issubclass(cls, nn.Module) and cls.__bases__ != (nn.Module,):
            yield Change(f"{cls.__name__}.__bases__", partial(put_before, cls=cls))
        elif issubclass(cls, nn.Module):
            yield Change(f"{cls.__name__}.__call__", partial(double, cls=cls, name="__call__"))
    for cls in dict.fromkeys(type(part) for part in module.modules()):
        if cls.__module__.startswith("torch.nn") and "forward" in vars(cls):
            yield Change(f"{cls.__name__}.forward", partial(double, cls=cls, name="forward"))
    yield Change("nn.Module.__call__", partial(double, cls=nn.Module, name="__call__"))


def instance_methods(module: nn.Module, random: Random) -> Iterator[Change]:
    """Methods, forward among them, that are set on an instance."""

    def put(module: nn.Module, path: str, name: str) -> None:
        part = module.get_submodule(path)
        setattr(part, name, doubled(getattr(part, name)))

    for path, part in module.named_modules():
        names = {name for cls in type(part).__mro__ if is_ours(cls) for name in vars(cls)} | {"forward"}
        for name in sorted(names):
            if isinstance(getattr(part, name, None), MethodType) and not name.startswith("__"):
                yield Change(f"{path}.{name}".lstrip("."), partial(put, path=path, name=name))


def apply_on_instance(held: Any) -> None:
    held.apply = doubled(held.apply)


def defaults(name: str) -> Callable[[Slot, nn.Module, Random], None]:
    def change(slot: Slot, module: nn.Module, random: Random) -> None:
        setattr(slot.get(module), name, another(getattr(slot.get(module), name), random))

    return change


def defaults_in_place(slot: Slot, module: nn.Module, random: Random) -> None:
    held = slot.get(module).__kwdefaults__
    held.update(another(held, random))


def closure_cells(module: nn.Module, random: Random) -> Iterator[Change]:
    for slot in function_slots(module):
        for index, name in enumerate(slot.get(module).__code__.co_freevars):
            cell = Slot(
                f"{slot.where} cell {name}",
                lambda module, slot=slot, index=index: slot.get(module).__closure__[index],
                "cell_contents",
            )
            yield from other_values(lambda module, cell=cell: [cell], changeable)(module, random)
            value = cell.get(module)
            yield from other_values(lambda module, c=cell, v=value: within(c, v))(module, random)


def other_code(slot: Slot, module: nn.Module, random: Random) -> None:
    function = slot.get(module)
    consts = [another(one, random) if type(one) is float else one for one in function.__code__.co_consts]
    function.__code__ = function.__code__.replace(co_consts=tuple(consts))


def function_attributes(module: nn.Module) -> Iterator[Slot]:
    for slot in function_slots(module):
        for name in vars(slot.get(module)):
            yield Slot(f"{slot.where}.{name}", slot.get, name)


# -- names ------------------------------------------------------------------------------------------------------------


def parts_of_global_modules(module: nn.Module) -> Iterator[Slot]:
    for slot in global_slots(module):
        if isinstance(slot.get(module), nn.Module):
            for inner in attribute_slots(slot.get(module)):
                yield Slot(f"{slot.where}.{inner.where}", slot.get, inner.key)


def is_namespace(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.startswith("change_")
    return isinstance(value, type) and is_ours(value) and not issubclass(value, nn.Module | tuple | enum.Enum)


def other_namespace(value: Any) -> Any:
    """A namespace with other numbers, in the place of a Python module or a class."""
    numbers = {name: held * 2 for name, held in vars(value).items() if type(held) is float}
    if isinstance(value, type):
        return type(value)(value.__name__, (value,), numbers)
    return SimpleNamespace(**{**vars(value), **numbers})


def put_other_namespace(slot: Slot, module: nn.Module, random: Random) -> None:
    slot.set(module, other_namespace(slot.get(module)))


def imported_modules(module: nn.Module) -> Iterator[Slot]:
    """`sys.modules`, which an import within forward reads."""
    for name in sorted(read_names(module)):
        if name.startswith("change_") and name in sys.modules:
            yield Slot(f"sys.modules[{name!r}]", lambda module: sys.modules, name, True)


def replaced_functions(spaces: Iterable[Any], names: Callable[[nn.Module], Iterable[str]]) -> Changes:
    """Functions that the code names, replaced where they lie."""

    def put(module: nn.Module, space: Any, name: str) -> None:
        setattr(space, name, doubled(getattr(space, name)))

    return lambda module, random: [
        Change(f"{space.__name__}.{name}", partial(put, space=space, name=name))
        for space in spaces
        for name in sorted(names(module))
        if callable(getattr(space, name, None)) and not isinstance(getattr(space, name), type)
    ]


def torch_names(module: nn.Module) -> set[str]:
    """What the code of the subjects and of torch's own modules in them names, but for questions and contexts."""
    found = set(read_names(module))
    for part in module.modules():
        if type(part).__module__.startswith("torch.nn") and "forward" in vars(type(part)):
            found |= names_in(type(part).forward.__code__)
    return {name for name in found if not name.startswith(("is_", "get_", "are_", "no_", "_"))}


def named_of(*names: str) -> Callable[[nn.Module], set[str]]:
    return lambda module: read_names(module) & {*names}


def hidden_builtins(module: nn.Module, random: Random) -> Iterator[Change]:
    """A global name that hides a builtin."""
    for function in code_of(module)[0].values():
        for name in sorted(names_in(function.__code__) & {"abs", "max", "sum", "len", "float", "int"}):
            space = function.__globals__
            other = doubled(getattr(builtins, name))
            yield Change(f"{space['__name__']}.{name}", lambda m, s=space, n=name, o=other: s.__setitem__(n, o))


KEPT_STATES: tuple[tuple[Callable[[Any], bool], str, Callable[[Any], Any]], ...] = (
    (lambda value: isinstance(value, ContextVar), "set", lambda held: held.set(2.5)),
    (lambda value: isinstance(value, threading.local), "value", lambda held: setattr(held, "value", 3.5)),
    (lambda value: isinstance(value, logging.Logger), "level", lambda held: held.setLevel(logging.DEBUG)),
    (lambda value: hasattr(value, "registry"), "register", lambda held: held.register(Tensor, lambda x: x * 9)),
)


# -- hooks, modes and flags -------------------------------------------------------------------------------------------


def result_hook(*args: Any) -> Any:
    return twice(args[-1])


def argument_hook(module: nn.Module, args: Any, *kwargs: Any) -> Any:
    changed = tuple(map(twice, args))
    return (changed, *kwargs) if kwargs else changed


def gradient_hook(module: nn.Module, grads: Any, outputs: Any = None) -> Any:
    return tuple(None if grad is None else grad * 10 for grad in grads)


def another_hook(hooks: str, new: Any) -> Callable[[nn.Module], None]:
    def put(part: nn.Module) -> None:
        held = getattr(part, hooks)
        held[next(iter(held))] = new

    return put


OF_ALL = nn.modules.module


class NegatedFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        own = (torch.relu, torch.tanh, F.linear, Tensor.mul, Tensor.add, F.leaky_relu)
        return -result if function in own and isinstance(result, Tensor) else result


class NegatedOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        aten = torch.ops.aten
        return -result if function in (aten.tanh.default, aten.mul.Tensor, aten.addmm.default) else result


GRAD_MODES = together(
    around_calls(enable_grad=torch.enable_grad, no_grad=torch.no_grad, inference_mode=torch.inference_mode),
    at_once(("for good", lambda module: torch.set_grad_enabled(not torch.is_grad_enabled()))),
)
PROCESS_MODES = together(
    at_once(
        ("default dtype", lambda module: torch.set_default_dtype(torch.float64)),
        ("default device", lambda module: torch.set_default_device("meta")),
        ("deterministic", lambda module: torch.use_deterministic_algorithms(True)),
        ("matmul precision", lambda module: torch.set_float32_matmul_precision("medium")),
        ("threads", lambda module: torch.set_num_threads(2)),
    ),
    around_calls(
        device=lambda: torch.device("meta"),
        autocast=lambda: torch.autocast("cpu", torch.bfloat16),
        anomaly=lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    ),
)
MKLDNN = together(
    at_once(("mkldnn.enabled", lambda module: setattr(torch.backends.mkldnn, "enabled", False))),
    around_calls(mkldnn=lambda: torch.backends.mkldnn.flags(enabled=False)),
)
ASKED = {"is_grad_enabled", "is_inference_mode_enabled", "requires_grad", "get_default_dtype", "is_autocast_enabled"}


def drop_all(part: Any) -> None:
    part.p = 1.0
    part.train()


# -- the environment and files ----------------------------------------------------------------------------------------


def environment(module: nn.Module, random: Random) -> Iterator[Change]:
    def another_environ(module: nn.Module, name: str, value: str) -> None:
        os.environ = {**os.environ, name: value}  # type: ignore[assignment]  # noqa: B003 - the object is replaced

    for name, value in (("SUBJECT_RATE", "2.5"), ("SUBJECT_FLAG", "1"), ("SUBJECT_MODE", "x"), ("UNRELATED", "1")):
        yield Change(name, lambda m, n=name, v=value: os.environ.__setitem__(n, v))
        yield Change(f"{name} in another os.environ", partial(another_environ, name=name, value=value))
    yield Change("os.getenv", lambda m: setattr(os, "getenv", lambda name, default=None: "x"))


def edited(name: str, file: str, old: str, new: str) -> Changes:
    """An edit of the model's file, or of one that it imports; of models whose code has this name."""

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return where_read({name}, lambda m, r: [Change(f"{file}: {new.strip()}", files={file: edit})])


EDITS = (
    edited("RATE", "change_subjects.py", "RATE = 0.625", "RATE = 1.125"),
    edited("halved", "change_subjects.py", "return x * 0.5\n", "return x * 1.5\n"),
    edited("slope", "change_subjects.py", "slope = 0.1", "slope = 0.8"),
    edited("tanh", "change_subjects.py", "torch.tanh(x)", "torch.relu(x)"),
    edited("TABLE", "change_subjects.py", '"shift": 0.25', '"shift": 2.25'),
    edited("scale", "change_subjects.py", "scale, kind = 1.75", "scale, kind = 2.75"),
    edited("alpha", "change_subjects.py", "self.on, self.none = 0.7", "self.on, self.none = 0.9"),
    edited("GAIN", "change_helpers.py", "GAIN = 1.25", "GAIN = 3.25"),
    edited("scaled", "change_helpers.py", "by: float = 1.5", "by: float = 2.5"),
    edited("through", "change_helpers.py", "times = 3.0", "times = 4.0"),
    edited("Tool", "change_helpers.py", "rate = 0.5", "rate = 5.5"),
    edited("curved", "change_deep.py", "DEPTH = 0.75", "DEPTH = 2.75"),
    edited("curved", "change_deep.py", "1.5]", "2.5]"),
    edited("curved", "change_deep.py", '"""What', '"""All that'),
)


def other_scale(module: nn.Module, random: Random) -> Iterator[Change]:
    number = random.choice((2.0, -3.5))
    yield Change("change_scale.txt", files={"change_scale.txt": lambda text: f"{number}\n"})


def imported_variable(module: nn.Module, random: Random) -> Iterator[Change]:
    yield Change("SUBJECT_AT_IMPORT", lambda m: os.environ.__setitem__("SUBJECT_AT_IMPORT", "3.5"), files={})


# -- the kinds --------------------------------------------------------------------------------------------------------

ROWS = (
    Row("attributes", "attributes that forward read", "compiled anew", "`BindError`", "`BindError`"),
    Row("modules", "modules within the module", "compiled anew", "`BindError`", "`BindError`"),
    Row("forms", "tensors, apart from their values", "compiled anew", "used if they fit, else `BindError`", "the same"),
    Row("values", "values of tensors", "frozen: compiled anew", "live: used; frozen: `BindError`", "the same"),
    Row("classes", "classes", "compiled anew", "`BindError`", "`BindError`"),
    Row("functions", "functions that forward ran", "compiled anew", "`BindError`", "`BindError`"),
    Row("names", "names of Python modules that forward read", "compiled anew", "`BindError`", "`BindError`"),
    Row("hooks", "hooks", "compiled anew", "`BindError`", "`BindError`"),
    Row("modes", "modes", "the build sets its own", "—", "`MissError`; `BindError` where forward asks"),
    Row("flags", "training flags", "the build sets its own", "`BindError`", "`MissError`"),
    Row("environment", "environment variables", "compiled anew", "`BindError`", "`BindError`"),
    Row("files", "what an import reads", "compiled anew", "`BindError`", "a process keeps what it imported"),
)
"""The rows of the guide's table: what is done about a change before the next build, before the load, and in a call.
Beside that a call may always compute what eager does: not every change of what was read changes the result."""

CALLS = ("after", "between")

KINDS: tuple[Kind, ...] = (
    Kind("nothing", "", at_once(("nothing", lambda module: None))),
    # attributes
    Kind("public ones", "attributes", other_values(of_name(private=False))),
    Kind("private ones", "attributes", other_values(of_name(private=True))),
    Kind("entries of containers, attributes of objects in them", "attributes", other_values(inner_slots)),
    Kind("functions and callable objects", "attributes", other_values(held_slots, is_callable)),
    Kind("containers that grow, shrink, or change their order", "attributes", grown(held_slots)),
    Kind("deleted ones", "attributes", at_slots(attribute_slots, ("deleted", delete))),
    Kind("added ones, which hide those of a class", "attributes", added_attributes),
    Kind("two that are exchanged", "attributes", exchanged_attributes),
    Kind(
        "`__dict__`",
        "attributes",
        at_slots(attribute_slots, ("in __dict__", write_dict), wanted=is_data),
    ),
    Kind(
        "tensors that are not buffers, written to",
        "attributes",
        plain_tensors(
            ("add_", lambda one: one.add_(1)),
            ("set_", lambda one: one.set_(one * 2)),
            ("data =", lambda one: setattr(one, "data", one * 3)),
        ),
    ),
    Kind(
        "tensors written to through `.data` or NumPy",
        "attributes",
        plain_tensors(
            (".data", lambda one: one.data.mul_(3)), ("numpy", lambda one: np.negative(one.numpy(), one.numpy()))
        ),
        blind=CALLS,
        unseen="writes through `.data` or NumPy to tensors in attributes",
        why_not="torch does not count such a write as a new version of the tensor",
    ),
    # modules
    Kind(
        "replaced ones",
        "modules",
        at_children(
            True,
            ("another", lambda child: nn.Softsign()),
            ("around it", Doubled),
            ("identity", lambda child: nn.Identity()),
            ("a copy, changed", other_module),
        ),
    ),
    Kind(
        "`None` ↔ module, lists that grow, shrink, or change their order",
        "modules",
        together(
            at_children(False, ("filled", lambda child: nn.Sigmoid())),
            at_children(True, ("None", lambda child: None)),
            deleted_child,
            at_slots(attribute_slots, ("filled", lambda s, m, r: s.set(m, nn.Sigmoid())), wanted=lambda v: v is None),
            at_parts(
                ("append", lambda part: part.append(nn.Sigmoid())),
                ("insert", lambda part: part.insert(0, nn.Sigmoid())),
                ("del", lambda part: part.__delitem__(-1)),
                ("order", turn_around),
                ("one twice", lambda part: part.append(part[0])),
                wanted=lambda part: isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 0,
            ),
            at_parts(("order", turn_around), wanted=lambda part: isinstance(part, nn.ModuleDict)),
        ),
    ),
    Kind("added ones", "modules", at_parts(("+ extra", lambda part: part.add_module("extra", nn.Tanh())))),
    Kind(
        "`__class__`, also of objects in attributes",
        "modules",
        together(
            at_parts((".__class__", other_class)),
            on_values(
                held_slots, lambda value: type(value).__name__ in ("Power", "Adder", "Gain"), ("class", other_class)
            ),
        ),
    ),
    Kind(
        "`forward` and other methods on an instance",
        "modules",
        together(
            instance_methods,
            on_values(held_slots, lambda value: type(value).__name__ == "Power", ("apply", apply_on_instance)),
        ),
    ),
    # tensors
    Kind(
        "parameters: replaced, another dtype, shape, strides or class, gone",
        "forms",
        at_tensors("_parameters", True, *FORMS_OF_TENSORS),
    ),
    Kind("buffers: the same", "forms", at_tensors("_buffers", True, *FORMS_OF_TENSORS)),
    Kind("parameters that were `None`", "forms", at_tensors("_parameters", False, ("filled", filled))),
    Kind("buffers that were `None`", "forms", at_tensors("_buffers", False, ("filled", filled))),
    Kind(
        "all at once: `to`, `load_state_dict`",
        "forms",
        at_once(
            ("double", lambda module: module.double()),
            ("bfloat16", lambda module: module.to(torch.bfloat16)),
            ("load_state_dict", lambda module: module.load_state_dict(other_state(module))),
            ("load_state_dict, assign", lambda module: module.load_state_dict(other_state(module), assign=True)),
            ("requires_grad_", lambda module: module.requires_grad_(False)),
            ("share_memory", lambda module: module.share_memory()),
        ),
    ),
    Kind(
        "`requires_grad`",
        "forms",
        at_tensors("_parameters", True, ("", lambda part, name, value: value.requires_grad_(not value.requires_grad))),
    ),
    Kind("ties", "forms", tied),
    Kind(
        "parametrizations",
        "forms",
        together(
            at_tensors(
                "_parameters",
                True,
                (
                    "parametrized",
                    computed(lambda part, name: parametrize.register_parametrization(part, name, Halved())),
                ),
                ("weight_norm", computed(nn.utils.weight_norm)),
                ("pruned", computed(lambda part, name: prune.l1_unstructured(part, name, 0.75))),
            ),
            at_parts(
                ("no longer", lambda part: parametrize.remove_parametrizations(part, "weight")),
                wanted=parametrize.is_parametrized,
            ),
        ),
    ),
    Kind(
        "`torch.func.functional_call`",
        "forms",
        lambda module, random: [Change("functional_call", around=functional_call)],
    ),
    Kind(
        "those of a table or a `__dict__` that is put in another's place",
        "forms",
        together(
            at_tensors("_parameters", True, ("in another dict", in_another_dict)),
            at_slots(attribute_slots, ("in another __dict__", replace_dict), wanted=is_data),
        ),
        blind=CALLS,
        unseen="a module's `__dict__` or `_parameters` replaced by another dict",
        why_not="calls read the dicts that the module had at the load",
    ),
    Kind("parameters written to", "values", at_tensors("_parameters", True, *WRITES)),
    Kind("buffers written to", "values", at_tensors("_buffers", True, *WRITES)),
    Kind("a step of an optimizer, fused or not", "values", steps),
    Kind(
        "those written to through `.data`, NumPy or the storage",
        "values",
        at_tensors("_parameters", True, *HIDDEN_WRITES),
        blind=CALLS,
        unseen="writes through `.data`, NumPy or the storage to parameters",
        why_not="torch does not count such a write; live weights are read in place, so it takes effect, and frozen "
        "ones are part of the code",
    ),
    # classes and functions
    Kind("attributes", "classes", other_values(class_slots)),
    Kind("entries of containers in attributes", "classes", other_values(class_inner)),
    Kind("methods, properties, static and class methods", "classes", at_slots(method_slots, ("", replace_method))),
    Kind("bases, and torch's own classes", "classes", base_classes),
    Kind(
        "default arguments",
        "functions",
        together(
            at_slots(function_slots, ("defaults", defaults("__defaults__")), wanted=lambda held: held.__defaults__),
            at_slots(
                function_slots,
                ("kwdefaults", defaults("__kwdefaults__")),
                ("kwdefaults in place", defaults_in_place),
                wanted=lambda held: held.__kwdefaults__,
            ),
        ),
    ),
    Kind("closures", "functions", closure_cells),
    Kind(
        "`__code__`",
        "functions",
        at_slots(function_slots, ("code", other_code), wanted=lambda held: float in map(type, held.__code__.co_consts)),
        blind=("build", "load"),
        unseen="another `__code__` of a function that forward runs",
        why_not="code is compared by its source file, which stays the same",
    ),
    Kind("attributes of functions", "functions", other_values(function_attributes)),
    # names
    Kind("values", "names", other_values(global_slots)),
    Kind("entries of containers, attributes of objects in them", "names", other_values(global_inner)),
    Kind("functions", "names", other_values(global_slots, is_callable)),
    Kind("containers that grow or shrink", "names", grown(read_slots)),
    Kind("an `nn.Module`", "names", other_values(parts_of_global_modules)),
    Kind("Python modules and classes", "names", at_slots(global_slots, ("", put_other_namespace), wanted=is_namespace)),
    Kind("`sys.modules`", "names", at_slots(imported_modules, ("", put_other_namespace))),
    Kind("functions of torch", "names", replaced_functions((torch, F, math), torch_names)),
    Kind(
        "methods of `Tensor`",
        "names",
        replaced_functions((Tensor,), named_of("abs", "mul", "clamp", "sum", "view", "reshape", "to", "flatten")),
    ),
    Kind(
        "builtins",
        "names",
        together(
            hidden_builtins, replaced_functions((builtins,), named_of("abs", "sum"))
        ),  # the build itself needs max
    ),
    Kind(
        "context variables, thread-local values, levels of loggers, registries",
        "names",
        together(*(on_values(global_slots, wanted, (label, way)) for wanted, label, way in KEPT_STATES)),
        blind=MOMENTS,
        unseen="context variables, thread-local values, levels of loggers and registries that forward reads",
        why_not="such state is kept by objects of C, or in a library's own tables",
    ),
    # hooks
    Kind(
        "on forward",
        "hooks",
        together(
            at_parts(
                ("hook", lambda part: part.register_forward_hook(result_hook)),
                ("hook, always", lambda part: part.register_forward_hook(result_hook, always_call=True)),
                ("hook, kwargs", lambda part: part.register_forward_hook(result_hook, with_kwargs=True)),
                ("hook, first", lambda part: part.register_forward_hook(result_hook, prepend=True)),
                ("pre-hook", lambda part: part.register_forward_pre_hook(argument_hook)),
                ("pre-hook, kwargs", lambda part: part.register_forward_pre_hook(argument_hook, with_kwargs=True)),
            ),
            at_parts(
                ("hooks cleared", lambda part: part._forward_hooks.clear()),
                ("another hook", another_hook("_forward_hooks", result_hook)),
                wanted=lambda part: bool(part._forward_hooks),
            ),
            at_parts(
                ("pre-hooks cleared", lambda part: part._forward_pre_hooks.clear()),
                ("another pre-hook", another_hook("_forward_pre_hooks", argument_hook)),
                wanted=lambda part: bool(part._forward_pre_hooks),
            ),
        ),
    ),
    Kind(
        "on the forward of all modules",
        "hooks",
        at_once(
            ("hook", lambda module: OF_ALL.register_module_forward_hook(result_hook)),
            ("hook, always", lambda module: OF_ALL.register_module_forward_hook(result_hook, always_call=True)),
            ("pre-hook", lambda module: OF_ALL.register_module_forward_pre_hook(argument_hook)),
        ),
    ),
    Kind(
        "on backward, with `train: true`",
        "hooks",
        together(
            at_parts(
                ("backward hook", lambda part: part.register_full_backward_hook(gradient_hook)),
                ("backward pre-hook", lambda part: part.register_full_backward_pre_hook(gradient_hook)),
            ),
            at_once(
                ("of all", lambda module: OF_ALL.register_module_full_backward_hook(gradient_hook)),
                ("pre-hook of all", lambda module: OF_ALL.register_module_full_backward_pre_hook(gradient_hook)),
            ),
        ),
        forms=("training",),
    ),
    Kind(
        "of parameters, which autograd runs",
        "hooks",
        at_tensors("_parameters", True, ("hook", lambda part, name, value: value.register_hook(lambda grad: grad * 3))),
        forms=("training",),
    ),
    Kind(
        "of `state_dict` and registration, which no call runs",
        "hooks",
        at_once(
            ("state_dict", lambda module: module.register_state_dict_post_hook(lambda *args: None)),
            ("registration", lambda module: OF_ALL.register_module_parameter_registration_hook(lambda *args: None)),
        ),
    ),
    # modes and flags
    Kind(
        "those that forward asks for",
        "modes",
        together(where_read(ASKED, together(GRAD_MODES, PROCESS_MODES)), where_read({"mkldnn"}, MKLDNN)),
    ),
    Kind("gradients, inference mode", "modes", GRAD_MODES),
    Kind(
        "function and dispatch modes",
        "modes",
        around_calls(
            function=NegatedFunctions, dispatch=NegatedOperators, disabled=torch._C.DisableTorchFunctionSubclass
        ),
    ),
    Kind(
        "saved-tensor hooks",
        "modes",
        around_calls(hooks=lambda: saved_tensors_hooks(torch.clone, lambda tensor: tensor)),
        forms=("training",),
    ),
    Kind("default dtype and device, autocast, deterministic algorithms, matmul precision", "modes", PROCESS_MODES),
    Kind(
        "of the module or a part",
        "flags",
        together(
            at_parts(
                ("train()", lambda part: part.train(not part.training)),
                ("training", lambda part: setattr(part, "training", not part.training)),
            ),
            at_parts(("drops all", drop_all), wanted=lambda part: isinstance(part, nn.Dropout)),
        ),
    ),
    # outside
    Kind("those that forward reads", "environment", where_read({"environ", "getenv"}, environment)),
    Kind("environment variables", "files", where_read({"FROM_ENVIRONMENT"}, imported_variable)),
    Kind("data files", "files", where_read({"SCALE"}, other_scale)),
    Kind("source files", "files", together(*EDITS)),
    Kind(
        "those that forward reads itself",
        "files",
        where_read({"read_text"}, other_scale),
        blind=MOMENTS,
        unseen="files that forward itself reads",
        why_not="their contents are not part of the process",
    ),
)


# -- the guide's table ------------------------------------------------------------------------------------------------


def guide_table() -> str:
    """The table "what is noticed" of `aotc/runtime/REFERENCE.md`, and the list of what cannot be."""
    lines = ["| what changes | before the next build | before the load | in a call |", "|---|---|---|---|"]
    for row in ROWS:
        kinds = "; ".join(kind.name for kind in KINDS if kind.row == row.name and not kind.blind)
        lines.append(f"| **{row.title}:** {kinds} | {row.build} | {row.load} | {row.call} |")
    lines += ["", "Not noticed:", ""]
    for kind in KINDS:
        if kind.blind:
            seen = {MOMENTS: "", CALLS: " Calls do not compare it; a load does."}
            then = seen.get(kind.blind, " A load does not compare it; calls do.")
            lines.append(f"- {kind.unseen[0].upper()}{kind.unseen[1:]}: {kind.why_not}.{then}")
    return "\n".join(lines) + "\n"
