"""[inductor] Branches of `torch.cond` read an operand with the strides that export saw.

Expected: the operand is laid out so, as those of `torch.while_loop` are. Seen: `expected size 5==5, stride 22==11`
where it is computed within a concatenation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.shared.conditions import operands_lie_as_exported

PATCH = Patch(
    __name__,
    operators=("higher_order.",),
    targets=("torch._inductor.lowering:lowerings[higher_order.cond]",),
)


def apply() -> AbstractContextManager[None]:
    return operands_lie_as_exported("cond")
