"""[inductor][cpu] Inverse hyperbolic functions of small and of large numbers are wrong in vectorised code.

Expected: `acosh(3e38)` is 89.2, `asinh(3e38)` likewise, and `atanh(1e-5)` 1e-5, as in eager. Seen: infinity, as
SLEEF's functions square their argument (`asinh`: in torch 2.11 and 2.12), and 1.0013e-5, as `atanh` is computed as
`log((1 + x) / (1 - x)) / 2`: at 1e-8 nothing of the argument is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.operators import FLOATS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0042",
    operators=tuple(f"aten.{arc}{name}" for arc in ("a", "arc") for name in ("cosh", "sinh", "tanh")),
    dtypes=FLOATS,
    device="cpu",
    targets=tuple(f"torch._inductor.codegen.cpp:CppVecOverrides.{name}(x)" for name in ("acosh", "asinh", "atanh")),
)

_LARGE = 1e15
"""From this number on the logarithm of the doubled number is exact in float64, and its square is finite in float32."""

_LOG_2 = 0.6931471805599453


@contextmanager
def apply() -> Iterator[None]:
    """While active, vectors call their functions, except for numbers that are too large to be squared."""
    from torch._inductor.codegen.cpp import CppVecOverrides

    def acosh(x: Any) -> str:
        kind = f"decltype({x})"
        return f"{kind}::blendv({x}.acosh(), {x}.log() + {kind}({_LOG_2}), {x} > {kind}({_LARGE}))"

    def asinh(x: Any) -> str:
        kind = f"decltype({x})"
        large = f"({x}.abs().log() + {kind}({_LOG_2})).copysign({x})"
        return f"{kind}::blendv({x}.asinh(), {large}, {x}.abs() > {kind}({_LARGE}))"

    def atanh(x: Any) -> str:
        return f"{x}.atanh()"

    with (
        replaced(CppVecOverrides, "acosh", acosh),
        replaced(CppVecOverrides, "asinh", asinh),
        replaced(CppVecOverrides, "atanh", atanh),
    ):
        yield


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.acosh(), x.asinh(), (-x).asinh(), (1 / x).atanh() * x

    assert_same(patches.compiled, function, torch.tensor([1.5, 1e4, 1e7, 9e14, 2e15, 1e19, 1e30, 3e38]))
