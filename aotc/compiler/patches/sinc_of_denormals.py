"""[inductor][triton] `sinc` of a denormal is 0.

Expected: `torch.sinc(torch.tensor(1e-39, device="cuda"))` is 1, as in eager. Seen: 0. Triton's sine flushes a denormal
argument to 0, and the decomposition divides the sine by the argument, which is not flushed (torch 2.11, 2.13).

    x = torch.tensor([1e-39, -1e-45], device="cuda")
    torch.compile(torch.sinc)(x)
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.shared.inductor import decomposed
from aotc.compiler.patches.shared.operators import FLOATS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0052",
    operators=("aten.sinc",),
    dtypes=FLOATS,
    device="cuda",
    targets=("aten.sinc.default(self)",),
)

_LEAST_NORMAL = torch.finfo(torch.float32).tiny
"""The sine of a smaller float32 may be flushed. `sinc` of any smaller number is 1 in each dtype."""


def apply() -> AbstractContextManager[None]:
    """While active, `sinc` of a number below float32's least normal one is 1."""
    return decomposed({torch.ops.aten.sinc.default: sinc})


def sinc(x: Tensor) -> Any:
    """sin(πx) / (πx) of floating-point numbers, and 1 where it would divide by zero or by a denormal."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    angle = math.pi * (x if x.dtype is torch.float64 else x.float())
    return torch.where(angle.abs() < _LEAST_NORMAL, 1.0, torch.sin(angle) / angle).to(x.dtype)
