"""[inductor] As `memory_of_operands`, with the class that torch 2.14 has for conditions.

Mended in torch 2.15.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.shared.conditions import operands_keep_their_memory, reproduce_memory_of_operands

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0019",
    complete=True,
    torch=">=2.14,<2.15",
    operators=("higher_order.",),
    targets=(
        "torch._inductor.ir:Switch.__init__(selector, ...)",
        "torch._inductor.ir:WhileLoop.__init__(carried_inputs, ...)",
    ),
)


def apply() -> AbstractContextManager[None]:
    return operands_keep_their_memory("Switch")


reproduce = reproduce_memory_of_operands
