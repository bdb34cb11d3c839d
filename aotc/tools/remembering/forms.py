"""The form of a call: what is the same for calls that differ in the values of tensors alone. Looked at in each call."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from aotc.runtime.call import CompiledCall


def form_of(args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Hashable:
    """Of tensors the size, dtype, device and layout; constants, containers, and the modes of torch that a manifest can
    say."""
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    named = tuple([(name, _form(value)) for name, value in kwargs.items()]) if kwargs else ()
    return tuple(map(_form, args)), named, autocast, torch.get_float32_matmul_precision()


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.is_contiguous() or value.stride(), value.requires_grad
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), *map(_form, value)
    if isinstance(value, Mapping):
        return type(value), *((str(name), _form(item)) for name, item in value.items())
    return type(value)


class Taker(NamedTuple):
    """The code that takes a call, and its bucket; or None, and why it is refused, in words. `is_near`: code that is
    refused for the sizes or values of arguments of its own kinds."""

    call: CompiledCall | None
    said: str
    is_near: bool = False


def taker_of(compiled: Iterable[CompiledCall], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Taker:
    """Which of this code takes a call; or why the code that is nearest to it does not."""
    asked = [_asked(call, args, kwargs) for call in compiled]
    return max(asked, key=lambda each: (each.call is not None, each.is_near), default=Taker(None, "there is none"))


class CallLike:
    """A call that was seen, without the values of its tensors: to ask which code takes one like it."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> None:
        """A call that is being made, in the modes of torch that it is made in."""
        self._arguments = _without_values((tuple(args), dict(kwargs)))
        self._device, self._autocast = device, torch.is_autocast_enabled(device)
        self._dtype, self._precision = torch.get_autocast_dtype(device), torch.get_float32_matmul_precision()
        self._gradients = torch.is_grad_enabled()

    def taker(self, compiled: Iterable[CompiledCall]) -> Taker:
        """Which of this code would run such a call; or why none would."""
        args, kwargs = _with_zeros(self._arguments)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self._precision)
        autocast = torch.autocast(self._device, dtype=self._dtype, enabled=self._autocast)
        try:
            with torch.set_grad_enabled(self._gradients), autocast:
                return taker_of(compiled, args, kwargs)
        finally:
            torch.set_float32_matmul_precision(before)


class _TensorLike(NamedTuple):
    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def _without_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _TensorLike(value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
    if isinstance(value, Mapping):
        return {name: _without_values(item) for name, item in value.items()}
    return type(value)(map(_without_values, value)) if isinstance(value, list | tuple) else value


def _with_zeros(value: Any) -> Any:
    if isinstance(value, _TensorLike):
        shape, strides, dtype, device, requires_grad = value
        elements = (
            1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        )
        zeros = torch.zeros(elements, dtype=dtype, device=device)
        return zeros.as_strided(shape, strides).requires_grad_(requires_grad)
    if isinstance(value, Mapping):
        return {name: _with_zeros(item) for name, item in value.items()}
    return type(value)(map(_with_zeros, value)) if isinstance(value, list | tuple) else value


def _asked(compiled: CompiledCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Taker:
    from aotc.runtime.explain.misses import kind_of_miss

    try:
        explanation = compiled.explain(*args, **kwargs)
    except Exception as error:  # arguments of another kind of calls or that cannot be looked at; the module changed
        return Taker(None, str(error))
    if explanation.kind == "miss":
        return Taker(None, kind_of_miss(explanation), is_near=bool(explanation.bucket or explanation.rejected))
    return Taker(compiled, explanation.bucket)


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
