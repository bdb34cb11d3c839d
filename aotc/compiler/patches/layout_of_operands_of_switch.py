"""[inductor] As `layout_of_operands`, for `switch`."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.conditions import operands_lie_as_exported

PATCH = Patch(
    __name__,
    severity="build",
    complete=True,
    torch=">=2.14",
    operators=("higher_order.",),
    targets=("torch._inductor.lowering:lowerings[higher_order.switch]",),
)


def apply() -> AbstractContextManager[None]:
    return operands_lie_as_exported("switch")


def reproduce(patches: Torch) -> None:
    try:
        from torch._higher_order_ops.switch import switch  # type: ignore[import-not-found]
    except ImportError:  # there is none yet
        return

    def function(x: Tensor, at: Tensor) -> list[Tensor]:
        part = x.sin()
        chosen = switch(at, [lambda a: (a.sum(0), a * 2), lambda a: (a.amax(0), a + 1)], (part,))
        return [*chosen, torch.cat([part, part * 2], -1)]

    assert_same(patches.compiled, function, torch.rand(5, 11), torch.tensor(1))
