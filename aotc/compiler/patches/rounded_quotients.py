"""[inductor] Rounded quotients of floats, and remainders, are not eager's.

Inductor floors a quotient that is already rounded to the nearest float: `1.0 // 0.1` is 10, though 0.1's nearest
float32 fits nine times. It computes a remainder by subtracting a multiple of this quotient: the last bits are wrong,
and the result is NaN for an infinite divisor. On GPUs its quotients are not the nearest floats either: that of equal
numbers can be below one.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.inductor import decomposed
from aotc.compiler.patches.shared.operators import DIVISIONS, FLOATS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0029",
    operators=DIVISIONS,
    dtypes=FLOATS,
    upstream="pytorch#197895",
    targets=(
        "aten.div.Tensor_mode(self, other, rounding_mode)",
        "aten.div.Scalar_mode(self, other, rounding_mode)",
        "aten.remainder.Tensor(self, other)",
        "aten.remainder.Scalar(self, other)",
        "aten.remainder.Scalar_Tensor(self, other)",
    ),
)


def apply() -> AbstractContextManager[None]:
    """While active, rounded quotients of floats and their remainders are computed as in eager: a remainder by `fmod` is
    exact, and the quotient is computed from it.
    """
    aten = torch.ops.aten
    return decomposed(
        {
            **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), _rounded_quotient),
            **dict.fromkeys((aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor), _remainder),
        }
    )


def _rounded_quotient(x: Any, y: Any, *, rounding_mode: str | None) -> Any:
    dtype = torch.result_type(x, y)
    if rounding_mode is None or not dtype.is_floating_point or (rounding_mode == "trunc" and dtype != torch.float32):
        return NotImplemented
    x, y = _operands(x, y)
    if rounding_mode == "trunc":
        return (x.double() / y.double()).float().trunc()  # a GPU's quotients of float64 are the nearest ones
    quotient, rest = x / y, torch.fmod(x, y)
    times = (x - rest) / y
    times = torch.where(_other_side(rest, y), times - 1, times)
    down = times.floor()
    down = torch.where(times - down > 0.5, down + 1, down)
    down = torch.where(times != 0, down, torch.copysign(torch.zeros_like(quotient), quotient))
    return torch.where(y != 0, down, quotient).to(dtype)


def _remainder(x: Any, y: Any) -> Any:
    dtype = torch.result_type(x, y)
    if not dtype.is_floating_point:
        return NotImplemented
    x, y = _operands(x, y)
    rest = torch.fmod(x, y)
    return torch.where(_other_side(rest, y), rest + y, rest).to(dtype)


def _operands(*values: Any) -> list[Tensor]:
    """As tensors; those of half precision in float32, as eager computes them. On a GPU, `fmod` of a float16 that is
    made of an index, as `arange` is, has no code."""
    dtype = torch.result_type(*values)
    dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    device = next(value.device for value in values if isinstance(value, Tensor))
    return [
        value.to(dtype) if isinstance(value, Tensor) else torch.scalar_tensor(value, dtype=dtype, device=device)
        for value in values
    ]


def _other_side(rest: Tensor, y: Tensor) -> Tensor:
    """A mask of the remainders, except zeros, whose sign is not the divisor's."""
    return (rest != 0) & ((rest < 0) != (y < 0))


def reproduce(patches: Torch) -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [torch.div(x, y, rounding_mode="floor"), torch.remainder(x, y)]

    assert_same(patches.compiled, function, torch.tensor([1.0, 7.5, 5.0]), torch.tensor([0.1, 0.3, math.inf]))
