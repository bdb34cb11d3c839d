"""The form of a call: what is the same for calls that differ in the values of tensors alone. Looked at in each call."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotc.reads.tensors import dtype_name


def form_of(args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Hashable:
    """Of tensors the size, dtype, device and layout; constants, containers, and the modes of torch that a manifest can
    say."""
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    named = tuple([(name, _form(value)) for name, value in kwargs.items()]) if kwargs else ()
    return tuple(map(_form, args)), named, autocast, torch.get_float32_matmul_precision()


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.dim() != 4 or value.is_contiguous(), value.requires_grad
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), *map(_form, value)
    if isinstance(value, Mapping):
        return type(value), *((str(name), _form(item)) for name, item in value.items())
    return type(value)


def ambient_here(device: str) -> dict[str, str | None]:
    """The modes of torch that this call is made in, as a manifest says those that are not torch's default."""
    found: dict[str, str | None] = {}
    if torch.is_autocast_enabled(device):
        found["autocast"] = dtype_name(torch.get_autocast_dtype(device))
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        found["float32_matmul_precision"] = precision
    return found


def records_gradients(tables: Iterable[Mapping[str, Tensor | None]], args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a tensor of a call requires a gradient: one of the module's tables of parameters, or of the arguments."""
    return any(
        tensor is not None and tensor.requires_grad for table in tables for tensor in table.values()
    ) or _requires_gradient([*args, *kwargs.values()])


def _requires_gradient(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, Mapping):
        return any(map(_requires_gradient, value.values()))
    return isinstance(value, list | tuple) and any(map(_requires_gradient, value))
