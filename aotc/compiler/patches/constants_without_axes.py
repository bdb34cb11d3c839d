"""[inductor] A constant without axes is not a tensor for many lowerings.

Expected: `torch.floor_divide(x, self.three)` of integers is floored, where `self.three` is a plain attribute,
`torch.tensor(3)`. Seen: it is truncated, and `torch.div(x, self.three, rounding_mode="trunc")` is of floats. Such an
attribute is an `ir.Constant`, and lowerings ask for a `TensorBox`: `is_integer_type` (mended in torch 2.14), the
promotion of dtypes, `pow` (StopIteration), and `view` (`'Constant' object has no attribute 'data'`; mended in 2.14).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.operators import DIVISIONS, INTEGERS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0043",
    operators=DIVISIONS,
    dtypes=INTEGERS,
    upstream="pytorch#186164",
    targets=("torch._inductor.graph:GraphLowering.get_attr(target, args, kwargs)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, a constant without axes is a tensor, as a constant with one axis is."""
    from torch._inductor import ir, lowering
    from torch._inductor.graph import GraphLowering

    lower: Any = GraphLowering.get_attr

    def get_attr(self: Any, target: str, args: Any, kwargs: Any) -> Any:
        value = lower(self, target, args, kwargs)
        if isinstance(value, ir.Constant):
            return lowering.full([], value.value, dtype=value.get_dtype(), device=value.get_device())
        return value

    return replaced(GraphLowering, "get_attr", get_attr)


def reproduce(patches: Torch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.three, self.scale = torch.tensor(3), torch.tensor(3.0)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            changed = y * 2
            changed[0, 0] = self.scale
            quotients = [torch.div(x, self.three, rounding_mode=mode) for mode in ("floor", "trunc")]
            return *quotients, x // self.three, x % self.three, y / (2 * self.scale.expand(3, 4) ** 2), changed

    assert_same(patches.compiled, Model(), torch.arange(-9, 9), torch.randn(3, 4))
