"""A result taken apart: its tensors and other values by their paths, whatever objects hold them.

So results are compared by what they hold, and never by which objects they are: an object that says nothing of equality
(a cache of keys and values) is equal to itself alone.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.tensors.caches import is_cache

Contents = dict[str, Any]

_WHOLE = (
    *(Tensor, nn.Module, type, enum.Enum, AbstractSet, str, bytes, bytearray, range, slice, int, float, complex),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
)
"""What is not taken apart."""


def contents(value: Any) -> Contents:
    """The parts of a result by their paths, like `.logits` or `[1].keys`; of a container its class, and what it holds.

    A module, a function and an iterator are parts as a whole; an array of NumPy is given as a tensor.
    """
    return dict(_parts("", value, ()))


def _parts(path: str, value: Any, within: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    members = None if value is None or isinstance(value, _WHOLE) or id(value) in within else _members(value)
    if members is None:
        yield path, _as_tensor(value)
        return
    yield path, type(value)
    for name, member in members.items():
        yield from _parts(path + name, member, (*within, id(value)))


def _members(value: Any) -> dict[str, Any] | None:
    """What a container or an object holds, by how it is reached; None where it cannot be told."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]" if not isinstance(key, str) else f".{key}": value[key] for key in value}
    if isinstance(value, list | tuple):
        return {f"[{index}]": item for index, item in enumerate(value)}
    if dataclasses.is_dataclass(value) and type(value) not in pytree.SUPPORTED_NODES:
        return {f".{field.name}": getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if type(value) in pytree.SUPPORTED_NODES and not is_cache(type(value)):
        children, _ = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        return {f"[{index}]": child for index, child in enumerate(children)}
    own = {**getattr(value, "__dict__", {}), **_slots(value)}
    return {f".{name}": item for name, item in own.items()} or None


def _slots(value: Any) -> dict[str, Any]:
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
    return {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}


def _as_tensor(value: Any) -> Any:
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        try:
            return torch.as_tensor(value)
        except (TypeError, RuntimeError, ValueError):  # texts, objects
            return value
    return value


def same_values(one: Any, other: Any) -> bool:
    """Whether two parts are equal that are not tensors; objects that say nothing of equality are if their class is."""
    if isinstance(one, Tensor):
        return False
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, type | torch.dtype | torch.layout | torch.memory_format):
        return False
    if isinstance(one, FunctionType | BuiltinFunctionType | MethodType):
        return bool(one.__qualname__ == other.__qualname__)
    if vars(object)["__eq__"] is type(one).__eq__:
        return True
    try:
        return bool(one == other) or bool(one != one and other != other)
    except Exception:  # a class of the user's
        return True
