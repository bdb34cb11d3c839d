"""[inductor] `x * 0` of NaN and infinity is 0.

Expected: NaN, as in eager. Seen: `UniformValueConstantFolder` replaces each product with the integer 0 by 0, of any
dtype: also `0 / x`, which is `0 * (1 / x)`, and what looks for NaN by a product. Mended in torch 2.14: only products
of integers are replaced.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
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
    advisory="AOTC-2026-0040",
    operators=("aten.mul", "aten.div", "aten.reciprocal"),
    dtypes=(*FLOATS, "complex64", "complex128"),
    torch=">=2.11,<2.14",
    upstream="pytorch#187580",
    targets=("torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder._add_peephole_patterns()",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, the folder takes no product of floats or complex numbers for 0."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    add: Any = UniformValueConstantFolder._add_peephole_patterns

    def add_integers(self: Any) -> None:
        add(self)
        for node in [*self.node_replacements]:
            dtype = node.meta["val"].dtype
            if dtype.is_floating_point or dtype.is_complex:
                for known in (self.node_replacements, self.node_replacements_shapes, self.constant_data_ptrs):
                    del known[node]

    return replaced(UniformValueConstantFolder, "_add_peephole_patterns", add_integers)


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x * 0, x * 0.0 + 1, 0 / x

    assert_same(patches.compiled, function, torch.tensor([torch.nan, torch.inf, -torch.inf, 0, 2]))
