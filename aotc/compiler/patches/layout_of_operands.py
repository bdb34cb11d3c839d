"""[inductor] Branches of `torch.cond` read an operand with the strides that export saw.

Expected: the operand is laid out so, as those of `torch.while_loop` are. Seen: `expected size 5==5, stride 22==11`
where it is computed within a concatenation.
"""

from __future__ import annotations

import itertools
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
    operators=("higher_order.",),
    targets=("torch._inductor.lowering:lowerings[higher_order.cond]",),
)


def apply() -> AbstractContextManager[None]:
    return operands_lie_as_exported("cond")


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> list[Tensor]:
        part, wide = x.sin(), x.tanh()
        chosen = [
            torch.cond(x.sum() > 0, lambda a: (a.sum(0), a * 2), lambda a: (a.amax(0), a + 1), (given,))
            for given in (part, wide[1:])
        ]
        return [*itertools.chain(*chosen), torch.cat([part, part * 2], -1), torch.cat([wide, x], -1)]

    assert_same(patches.compiled, function, torch.rand(5, 11))
