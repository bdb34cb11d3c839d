"""[inductor] As `layout_of_operands`, for `switch`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.shared.conditions import operands_lie_as_exported

PATCH = Patch(
    __name__,
    torch=">=2.14",
    operators=("higher_order.",),
    targets=("torch._inductor.lowering:lowerings[higher_order.switch]",),
)


def apply() -> AbstractContextManager[None]:
    return operands_lie_as_exported("switch")
