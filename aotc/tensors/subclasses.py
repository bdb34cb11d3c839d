"""Tensors of traceable wrapper subclasses, which keep their values in other tensors, as torchao's quantised weights do.

Compiled code takes the plain tensors within, each under the parameter's name and its path in it: `a.weight.qdata`. They
are found by torch's own protocol, `__tensor_flatten__`, so no library of quantisation is imported here. All else that
the protocol gives (a block size, what is done to activations) is part of the compiled code: `describe` makes plain data
of it, in the form in which torchao writes it into the header of a safetensors file.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor


def is_wrapper(value: Any) -> bool:
    return hasattr(value, "__tensor_flatten__") and isinstance(value, Tensor)


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that hold a tensor's values, by their paths in it: itself at "", if it is a plain one."""
    return {path: inner for path, inner in _walk(tensor) if not is_wrapper(inner)}


def holders(tensor: Tensor) -> dict[str, Tensor]:
    """The wrappers within a tensor by their paths in it; itself at "", if it is one."""
    return {path: inner for path, inner in _walk(tensor) if is_wrapper(inner)}


def _walk(tensor: Tensor, path: str = "") -> Iterator[tuple[str, Tensor]]:
    yield path, tensor
    if is_wrapper(tensor):
        for name in inner_names(tensor):
            yield from _walk(getattr(tensor, name), inner_name(path, name))


def inner_names(tensor: Any) -> list[str]:
    """The names of a wrapper's tensors: torch's protocol also names a DTensor's device mesh."""
    return [name for name in tensor.__tensor_flatten__()[0] if isinstance(getattr(tensor, name), Tensor)]


def slots_of(tensor: Any) -> dict[str, Any]:
    """Where the tensors of a wrapper are: its own attributes. A DTensor, which has none, keeps the tensor that it was
    made of, so its tensors are given as they are."""
    own, names = vars(tensor), inner_names(tensor)
    return own if all(name in own for name in names) else {name: getattr(tensor, name) for name in names}


def is_dtensor(value: Any) -> bool:
    """Whether it is a tensor of several ranks, of which this process holds a part."""
    return is_wrapper(value) and type(value).__module__.startswith("torch.distributed.")


def inner_name(name: str, path: str) -> str:
    return ".".join(filter(None, (name, path)))


def unwrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with the plain tensors of each wrapper in its place."""
    return {
        inner_name(name, path): inner for name, each in state.items() for path, inner in inner_tensors(each).items()
    }


def descriptions(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """By the name of each plain tensor within a wrapper of `state`: the description of the wrapper."""
    return {
        inner_name(name, path): description
        for name, description in wrappers(state).items()
        for path in paths_in(description)
    }


def wrappers(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The descriptions of those of `state` that are wrappers, by their names."""
    return {name: describe(tensor) for name, tensor in state.items() if is_wrapper(tensor)}


def describe(tensor: Any) -> Any:
    """What compiled code takes for granted of a wrapper, as plain JSON; None for a plain tensor."""
    if not is_wrapper(tensor):
        return None
    # Of a DTensor, what a library that splits it decides: `S(0)`, split along axis 0.
    context = [[str(one) for one in tensor.placements]] if is_dtensor(tensor) else tensor.__tensor_flatten__()[1]
    names = inner_names(tensor)
    inner = {name: description for name in names if (description := describe(getattr(tensor, name))) is not None}
    return {
        "class": type(tensor).__qualname__,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "tensors": sorted(names),
        "context": plain(context),
        **({"inner": inner} if inner else {}),
    }


def agrees(expected: Any, found: Any) -> bool:
    """Whether a description is the expected one, as far as it goes: a checkpoint's header says nothing of shapes."""
    if expected is None or found is None:
        return expected is found
    return all(expected.get(name) == value for name, value in found.items())


def plain(value: Any) -> Any:
    """A value of a wrapper's context as plain JSON. One of an unknown class counts by the class alone."""
    if isinstance(value, enum.Enum):
        return _typed(value, value.name)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, torch.dtype):
        return {"_type": "torch.dtype", "_data": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"_type": "torch.device", "_data": value.type}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return _typed(value, {field.name: plain(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _typed(value, {name: plain(each) for name, each in value._asdict().items()})
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return _typed(value, None)


def _typed(value: Any, data: Any) -> dict[str, Any]:
    return {"_type": type(value).__name__, "_data": data}


def paths_in(description: Any) -> list[str]:
    """The paths of the plain tensors within a wrapper, by its description."""
    inner = description.get("inner", {})
    nested = [inner_name(name, path) for name, each in inner.items() for path in paths_in(each)]
    return [*(name for name in description["tensors"] if name not in inner), *nested]
