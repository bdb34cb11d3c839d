"""[inductor][cpu] A tiled reduction stores a whole vector where its tail has fewer elements.

Expected: the last vector of a row is stored with as many elements as the row has left. Seen, where another loop is
between the loop that is a vector and the loop that is reduced: the whole vector is stored, over the next row, and
behind the last row over memory that is not the kernel's. Inductor makes both stores, and chooses between them only
where it finds the reduced loop directly within the vector's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0050",
    operators=(
        *("aten.sum", "aten.mean", "aten.prod", "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.aminmax"),
        *("aten.argmax", "aten.argmin", "aten.any", "aten.var", "prims.xor_sum"),
        *("aten.bmm", "aten.mm"),  # of few elements: Inductor makes them a product and a sum
    ),
    device="cpu",
    upstream="pytorch#196681",
    targets=(
        "torch._inductor.codegen.cpp:CppKernelProxy.aggregate_reduction_buffers"
        "(inner_loop_reduction_outer_not, outer_loop)",
    ),
)


def apply() -> AbstractContextManager[Any]:
    """While active, a reduction within a vector's loop, however deep, has a store of its own for the tail."""
    from torch._inductor.codegen.cpp import CppKernelProxy

    aggregate: Any = CppKernelProxy.aggregate_reduction_buffers

    def aggregated(self: Any, inner_loop_reduction_outer_not: bool, outer_loop: Any) -> None:
        if outer_loop is not None and not outer_loop.is_reduction:
            inner_loop_reduction_outer_not = self.loop_nest.loops[-1].is_reduction
        aggregate(self, inner_loop_reduction_outer_not, outer_loop)

    return replaced(CppKernelProxy, "aggregate_reduction_buffers", aggregated)


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        """A product of a matrix and a column for each of 66 batches, the tail of a vector of 8 or 16."""
        y = F.gelu(x)
        column = F.pad(y.permute(3, 2, 1, 0), (0, 0, 0, 58), value=0.5)
        return torch.matmul(F.pad(y, (0, 0, 0, 0, 0, 58), value=0.5), column)

    assert_same(patches.compiled, function, torch.randn(1, 8, 66, 66).contiguous(memory_format=torch.channels_last))
