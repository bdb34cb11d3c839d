"""[inductor] `x ** -0.5` of -0.0 and of minus infinity is not eager's.

Expected: -inf and NaN, as in eager, which computes the inverse square root of `x`. Seen: inf and 0, of C's `pow`.
Inductor computes `x ** 0.5` as a square root, as eager does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.inductor import decomposed
from aotc.compiler.patches.shared.operators import FLOATS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0044",
    operators=("aten.pow",),
    dtypes=FLOATS,
    targets=("aten.pow.Tensor_Scalar(self, exponent)",),
)


def apply() -> AbstractContextManager[None]:
    """While active, this power is an inverse square root."""
    return decomposed({torch.ops.aten.pow.Tensor_Scalar: _inverse_square_root})


def _inverse_square_root(x: Tensor, exponent: Any) -> Any:
    known = isinstance(exponent, float) and exponent == -0.5 and x.is_floating_point()
    return torch.rsqrt(x) if known else NotImplemented


def reproduce(patches: Torch) -> None:
    x = torch.tensor([-0.0, -torch.inf, torch.inf, 0, 4, -1, torch.nan])
    for dtype in (torch.float32, torch.bfloat16):
        assert_same(patches.compiled, lambda x: x**-0.5, x.to(dtype))
