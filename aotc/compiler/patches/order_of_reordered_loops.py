"""[inductor] A CPU kernel that is given another's loops loses what it must come after.

Expected: the old value is read before the tensor is written. Seen: after it. torch 2.13 keeps the ordering
dependencies, and torch 2.15 also the new names of written tensors (`recompute_size_and_body` of its scheduler.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.operators import WRITES

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0025",
    operators=WRITES,
    torch=">=2.11,<2.12",
    targets=("torch._inductor.scheduler:SchedulerNode.recompute_size_and_body(extra_indexing_constraints)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, a kernel whose loops are reordered keeps its ordering dependencies."""
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    recompute = SchedulerNode.recompute_size_and_body

    def recompute_in_order(node: Any, *args: Any, **kwargs: Any) -> None:
        after = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, WeakDep | StarDep))
        recompute(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.with_read(after).rename(node.mutation_renames))

    with replaced(SchedulerNode, "recompute_size_and_body", recompute_in_order):
        yield


def reproduce(patches: Torch) -> None:
    def function(last: Tensor, x: Tensor) -> Tensor:
        before = last * 1
        last[0] = x
        before[:, 2:] *= 2
        return before

    assert_same(patches.compiled, function, torch.arange(100.0).view(5, 4, 5), torch.randn(4, 5))
