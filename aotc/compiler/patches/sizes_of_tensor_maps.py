"""[inductor] Persistent TMA templates fix every size of a matrix product.

Expected: a product of a dynamic size is compiled once. Seen, from torch 2.12 on: once for each size, and AOTInductor's
code for a range holds for the example's size only: `can_use_tma(…, add_guards=True)` guards on the sizes and strides,
where a template's tensor maps take those of the call. The template's own condition, strides that are multiples of 16
bytes, is checked for all sizes. On Hopper, with `triton.enable_persistent_tma_matmul`.

    a, b = torch.randn(256, 64, device="cuda").bfloat16(), torch.randn(64, 64, device="cuda").bfloat16()
    product = torch.compile(torch.mm, mode="max-autotune", dynamic=True)
    product(a, b), product(a[:128], b)      # compiled twice
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.shared.operators import PRODUCTS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0032",
    operators=PRODUCTS,
    only=("range",),
    device="cuda",
    torch=">=2.12",
    targets=("torch._inductor.utils:can_use_tma(*matrices, output_layout, add_guards)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, whether tensor maps can be made is asked without a guard: as torch 2.11 does. What holds at the
    example's sizes alone is left to `invalid_tensor_maps`."""
    from torch._inductor import utils

    usable: Any = utils.can_use_tma

    def without_guards(*matrices: Any, output_layout: Any = None, add_guards: bool = False) -> bool:
        return bool(usable(*matrices, output_layout=output_layout))

    return replaced(utils, "can_use_tma", without_guards)
