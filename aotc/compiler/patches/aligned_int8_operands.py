"""[inductor][cpu] `_weight_int8pack_mm` ends the process for operands that are not aligned, such as a graph's inputs.

Expected: eager's result of `(x @ weight.to(x.dtype).mT) * scale`, of which Inductor makes this operator. Seen: a
segmentation fault; for a bfloat16 `x` at any address that is not a multiple of 32, for the int8 weight at one that is
not a multiple of 16. Memory that torch allocates is such a multiple; a caller's slice need not be.

    x = torch.ones(257, dtype=torch.bfloat16)[1:].view(4, 64)
    torch._weight_int8pack_mm(x, torch.ones(64, 64, dtype=torch.int8), torch.ones(64, dtype=torch.bfloat16))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="crash",
    advisory="AOTC-2026-0002",
    operators=("aten._weight_int8pack_mm", "torch._inductor.fx_passes.quantization.woq_int8"),
    device="cpu",
    targets=("torch._inductor.quantized_lowerings:mm_args(mat1, mat2, ...)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, the first operand is copied where it is an input or begins within another tensor."""
    from torch._inductor import ir
    from torch._inductor import quantized_lowerings as imported
    from torch._inductor.virtualized import V

    quantized_lowerings: Any = imported

    def aligning(operands: Callable[..., Any]) -> Callable[..., Any]:
        def aligned(*args: Any, **kwargs: Any) -> Any:
            *sizes, x, weight = operands(*args, **kwargs)
            if x.get_name() in V.graph.graph_inputs or x.get_layout().offset != 0:
                x = ir.ExternKernel.copy_input(x)
            return *sizes, x, weight

        return aligned

    with replaced(quantized_lowerings, "mm_args", aligning(quantized_lowerings.mm_args)):
        yield


def reproduce(patches: Torch) -> None:
    def function(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, weight.to(x.dtype)) * scale

    memory = torch.ones(1 + 4 * 64, dtype=torch.bfloat16)
    x, scale = memory[1:].view(1, 4, 64), torch.ones(64, dtype=torch.bfloat16)
    weight = torch.ones(64, 64, dtype=torch.int8)
    result = patches.compiled(function, x, weight, scale)(x, weight, scale)
    assert result.eq(64).all()
