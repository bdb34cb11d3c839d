"""Numbers beside complex tensors: `z / 2`, `z != 1j`, `torch.full((3,), 1j)`, and differences of complex tensors.

A library calls torch's operators for complex tensors by name, and torch writes down no complex number for one, nor a
number where an operator takes a tensor: the build failed. Here such numbers are tensors.

Inductor has a sum of complex numbers, and gives torch's operator for a difference one argument more than it takes: such
a call fails (torch 2.13). `x - y` is `x + -1 * y`, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aotc.build.inductor.decomposed import decomposed


def complex_numbers_are_tensors() -> AbstractContextManager[None]:
    """A context in which numbers beside complex tensors are compiled as tensors, and a difference as a sum."""
    aten = torch.ops.aten
    return decomposed(
        {
            aten.full.default: _full,
            aten.scalar_tensor.default: partial(_full, ()),
            aten.div.Tensor: _of_tensors(torch.div),
            aten.eq.Scalar: _of_tensors(torch.eq),
            aten.ne.Scalar: _of_tensors(torch.ne),
            aten.sub.Tensor: _difference,
        }
    )


def _full(size: Any, value: Any, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
    if not (isinstance(value, complex) if dtype is None else dtype.is_complex):
        return NotImplemented
    dtype = dtype or torch.get_default_dtype().to_complex()
    number, more = complex(value), {"dtype": dtype.to_real(), "device": more.get("device")}
    return torch.complex(torch.full(size, number.real, **more), torch.full(size, number.imag, **more))


def _of_tensors(operator: Callable[..., Any]) -> Callable[..., Any]:
    def compute(x: Any, y: Any) -> Any:
        tensors = [value for value in (x, y) if isinstance(value, Tensor)]
        dtype = torch.result_type(x, y)
        if len(tensors) == 2 or not dtype.is_complex:
            return NotImplemented
        device = tensors[0].device
        return operator(
            *(v if isinstance(v, Tensor) else torch.full((), v, dtype=dtype, device=device) for v in (x, y))
        )

    return compute


def _difference(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    if not any(isinstance(value, Tensor) and value.is_complex() for value in (x, y)):
        return NotImplemented
    return torch.add(x, y, alpha=-alpha)
