"""[inductor][cpu] `expm1` of small numbers has few right digits in vectorised code.

Expected: `torch.expm1(x)` has eager's digits for a small `x`. Seen: it is computed as `exp(x) - 1`, "for a better
performance": at 1e-4 three of seven digits are right, at 1e-7 none. ELU, SELU, CELU and xIELU call it. Mended in torch
2.14.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.operators import FLOATS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0034",
    operators=("aten.expm1", "aten.special_expm1", "aten.elu", "aten.celu", "aten.selu"),
    dtypes=FLOATS,
    torch=">=2.11,<2.14",
    device="cpu",
    targets=("torch._inductor.codegen.cpp:CppVecOverrides.expm1(x)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, vectors call their `expm1`, as eager does."""
    from torch._inductor.codegen.cpp import CppVecOverrides

    def expm1(x: Any) -> str:
        return f"{x}.expm1()"

    return replaced(CppVecOverrides, "expm1", expm1)


def reproduce(patches: Torch) -> None:
    def function(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return torch.expm1(x) / x, x * (F.elu(scale) + 1)  # one value for a row: not a vector's function

    assert_same(patches.compiled, function, torch.arange(1, 65).reshape(2, 32) * 1e-5, torch.tensor([[-0.5], [0.5]]))
