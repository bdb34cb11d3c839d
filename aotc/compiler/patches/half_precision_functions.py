"""Shorter functions for half-precision values on GPUs: sine, cosine, hyperbolic tangent and sigmoid.

CUDA's functions accept any float32, and do work that only other values need. Sine and cosine each reduce their argument
separately, and multiply long integers if it is above 105,615; but no float16 is above 65,504, for which three steps in
float32 are enough, and sine and cosine of one value can share them. The hyperbolic tangent has two branches, and a warp
with values for both runs both; its exponential is exact to the last bits of a float32, and its division, like the
sigmoid's, is for divisors of any size. A kernel with many of these is bound by their instructions, so it is as slow in
half precision as in float32. Here the pair takes about 21 instructions instead of 50 and more, the tangent 12 instead
of 23, without a branch, and the sigmoid 5 instead of 12.

Sine and cosine have the absolute error of CUDA's; the relative error of tangent and sigmoid is below 2⁻¹⁷, that of a
float16 is 2⁻¹². As everywhere in a fused kernel, intermediate results are float32: for a value above 65,504, which is
infinite in eager's float16 and has no sine, the result is an arbitrary number.

Source of sine and cosine: Cephes, sinf.c (S. L. Moshier): the reduction in steps, here of multiples of π/2, and the
polynomial of the sine. The cosine's polynomial has one power less, fitted by Remez's algorithm, with an error of
3.2e-8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.shared.inductor import decomposed

PATCH = Patch(
    __name__,
    kind="performance",
    device="cuda",
    targets=(
        "aten.sin.default(self)",
        "aten.cos.default(self)",
        "aten.tanh.default(self)",
        "aten.sigmoid.default(self)",
    ),
)

_HALF_PI = (201 / 2**7, 253 / 2**19, 1.2675907950567e-6)
"""π/2 in parts; the first two have so few bits that their multiples are exact."""

_SINE = (1.0, -1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4)

_COSINE = (1.0, -0.499998946243, 0.0416562842714, -0.00135976789744)

_TANGENT = (1.0, -1 / 3, 2 / 15)
"""Coefficients of even powers, from the lowest; a sine and a tangent have one power more."""

_SIGN = -(2**31)
"""The sign bit of a float32, as an int32."""

_LOG2_E = 1 / math.log(2)

_TO_INTEGER = 1.5 * 2**23
"""Adding this to a smaller float32 rounds it to an integer, which is then in the lower bits."""


def apply() -> AbstractContextManager[None]:
    """While active, Inductor uses these functions for half-precision values on a GPU."""
    aten = torch.ops.aten
    return decomposed(
        {
            aten.sin.default: _of(sine, torch.float16),
            aten.cos.default: _of(cosine, torch.float16),
            aten.tanh.default: _of(hyperbolic_tangent, torch.float16, torch.bfloat16),
            aten.sigmoid.default: _of(sigmoid, torch.float16, torch.bfloat16),
        }
    )


def sine(x: Tensor) -> Tensor:
    """The sine of float16 values, computed in float32."""
    quarters, rest = _reduced(x.float())
    return _of_quarter(quarters, rest).to(x.dtype)


def cosine(x: Tensor) -> Tensor:
    """The cosine of float16 values, computed in float32."""
    quarters, rest = _reduced(x.float())
    return _of_quarter(quarters + 1, rest).to(x.dtype)


def hyperbolic_tangent(x: Tensor) -> Tensor:
    """The hyperbolic tangent of float16 or bfloat16 values, computed in float32."""
    value = x.float()
    near_zero = value * _polynomial(_TANGENT, value * value)
    far = 1 - 2 * _reciprocal(1 + torch.exp2(value * (2 * _LOG2_E)))
    return torch.where(value.abs() < 0.16, near_zero, far).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """The logistic function of float16 or bfloat16 values, computed in float32."""
    return _reciprocal(1 + torch.exp2(x.float() * -_LOG2_E)).to(x.dtype)


def _reciprocal(x: Tensor) -> Tensor:
    """The reciprocal of values of at least 1."""
    root = torch.rsqrt(x)
    return root * root


def _reduced(x: Tensor) -> tuple[Tensor, Tensor]:
    """An integer and a rest of at most π/4: x = integer × π/2 + rest. Only the last two bits of the integer matter."""
    shifted = x * (2 / torch.pi) + _TO_INTEGER
    count = shifted - _TO_INTEGER
    for part in _HALF_PI:
        x = x - count * part
    return shifted.view(torch.int32), x


def _of_quarter(quarters: Tensor, rest: Tensor) -> Tensor:
    """The sine of `quarters` × π/2 + `rest`."""
    square = rest * rest
    odd = (quarters & 1) != 0
    result = torch.where(odd, _polynomial(_COSINE, square), rest * _polynomial(_SINE, square))
    return (result.view(torch.int32) ^ ((quarters << 30) & _SIGN)).view(torch.float32)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    *lower, highest = coefficients
    result = x * highest + lower.pop()
    while lower:
        result = result * x + lower.pop()
    return result


def _of(function: Callable[[Tensor], Tensor], *dtypes: torch.dtype) -> Callable[[Tensor], Any]:
    def own(x: Tensor) -> Any:
        return function(x) if x.dtype in dtypes and x.is_cuda else NotImplemented

    return own
