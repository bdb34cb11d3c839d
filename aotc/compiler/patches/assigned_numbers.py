"""[inductor] A frozen constant without axes cannot be assigned to an element.

Expected: the element is set. Seen: `'Constant' object has no attribute 'data'`, as the assigned value is reshaped to
its destination. Mended in torch 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="build",
    torch=">=2.11,<2.14",
    targets=("torch._inductor.lowering:view(x, sizes)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, a constant without axes can be reshaped."""
    from torch._inductor import ir, lowering

    view: Any = lowering.view

    def view_of(value: Any, sizes: Any) -> Any:
        if isinstance(value, ir.Constant):
            value = lowering.full([], value.value, dtype=value.dtype, device=value.device)
        return view(value, sizes)

    with replaced(lowering, "view", view_of):
        yield


def reproduce(patches: Torch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Buffer(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y[0, 0] = self.one
            return y

    model, x = Model(), torch.randn(3, 3)
    torch.testing.assert_close(patches.library(model, x, freezing=True)(x)[0], model(x))
