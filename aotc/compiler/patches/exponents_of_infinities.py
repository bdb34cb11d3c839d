"""[inductor][triton] The exponents that `frexp` gives for NaN and infinities are not eager's.

Expected: 0, as in eager. Seen: -2147483647 for NaN, as a kernel adds 1 to `ilogb` of its argument (torch 2.11, 2.13).

    x = torch.tensor([float("nan"), float("inf")], device="cuda")
    torch.compile(torch.frexp)(x).exponent
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.shared.operators import FLOATS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0053",
    operators=("aten.frexp",),
    dtypes=FLOATS,
    device="cuda",
    targets=("torch._inductor.codegen.triton:TritonKernelOverrides.frexp(x)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, the exponent of a number that is not finite is 0."""
    from torch._inductor.codegen.triton import TritonKernelOverrides
    from torch._inductor.virtualized import V

    torchs: Any = TritonKernelOverrides.frexp

    def frexp(x: Any) -> Any:
        mantissa, exponent = torchs(x)
        finite = f"tl.where(tl_math.abs({x}) < float('inf'), {exponent}, 0)"
        return mantissa, V.kernel.cse.generate(V.kernel.compute, finite, dtype=torch.int32, shape=x.shape)

    return replaced(TritonKernelOverrides, "frexp", frexp)
