"""[inductor] Branches of `torch.cond` see what is written to an operand later.

Expected: the operand's value when the condition was reached. Seen: the value after `first[first > 0] = 0.5`: Inductor
computes the new values in a new buffer, and rebinds the TensorBox to it, to which the operand still refers when the
code is generated. torch 2.15 writes them to the old memory (`mutate_to` of its lowering.py), after all reads of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.shared.conditions import operands_keep_their_memory, reproduce_memory_of_operands

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0018",
    complete=True,
    torch=">=2.11,<2.14",
    operators=("higher_order.",),
    targets=(
        "torch._inductor.ir:Conditional.__init__(predicate, ...)",
        "torch._inductor.ir:WhileLoop.__init__(carried_inputs, ...)",
    ),
)


def apply() -> AbstractContextManager[None]:
    return operands_keep_their_memory("Conditional")


reproduce = reproduce_memory_of_operands
