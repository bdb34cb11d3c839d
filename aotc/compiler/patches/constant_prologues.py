"""[inductor] A product of a tensor that is constant does not compile by a template on a GPU.

Expected: `F.linear(torch.zeros_like(x), weight)`, as in DETR's decoder, builds. Seen, where Triton's template is taken:
`Cannot broadcast, rank mismatch`. Inductor computes the operand within the template, by `tl.full([1], 0.0, tl.float32)
.broadcast_to(xindex.shape)`. Triton does not broadcast one axis to two.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.shared.inductor import inductor

PATCH = Patch(
    __name__,
    severity="build",
    device="cuda",
    targets=(
        "torch._inductor.scheduler:"
        "Scheduler.check_prologue_fusion_heuristics_fusable(prologue_node, template_node, why)",
    ),
)


def apply() -> AbstractContextManager[Any]:
    """While active, what reads no memory is stored before a template reads it."""
    Scheduler: Any = inductor("scheduler").Scheduler
    is_worth_it = Scheduler.check_prologue_fusion_heuristics_fusable

    def check_prologue_fusion_heuristics_fusable(self: Any, prologue_node: Any, template_node: Any, why: Any) -> bool:
        if not prologue_node.get_read_buffer_sizes():
            return False
        found: bool = is_worth_it(self, prologue_node, template_node, why)
        return found

    return replaced(Scheduler, "check_prologue_fusion_heuristics_fusable", check_prologue_fusion_heuristics_fusable)
