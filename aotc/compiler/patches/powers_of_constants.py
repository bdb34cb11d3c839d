"""[inductor] A scalar constant to a power ends in a StopIteration.

Expected: its value. Seen: `pow` of `lowering.py` takes the dtype from the first argument that is a `TensorBox`. A
buffer of one element is a `Constant`, and its `expand` an `ExpandView`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced_entries
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="build",
    torch=">=2.11",
    targets=("torch._inductor.lowering:lowerings[aten.pow.Tensor_Scalar]",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, the base of such a power is a tensor."""
    from torch._inductor import ir, lowering

    table: dict[Any, Callable[..., Any]] = lowering.lowerings
    operator = torch.ops.aten.pow.Tensor_Scalar
    lower = table[operator]

    def power(base: Any, exponent: Any) -> Any:
        if isinstance(base, ir.Constant):
            base = lowering.full([], base.value, dtype=base.get_dtype(), device=base.get_device())
        elif isinstance(base, ir.BaseView):
            base = ir.TensorBox(base)
        return lower(base, exponent)

    with replaced_entries(table, {operator: power}):
        yield


def reproduce(patches: Torch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Buffer(torch.tensor(3.0))

        def forward(self, x: Tensor) -> Tensor:
            return x / (2 * self.scale.expand(3, 4) ** 2)

    assert_same(patches.library, Model(), torch.randn(3, 4))
