"""[inductor] A kernel that reads rows is fused with one that overwrites them.

Two kernels are fused if the second writes exactly the elements that the first reads. A tensor that was written to
before has another name in the first, and torch before 2.15 did not see that it is the same tensor (`fusable_weak_dep`):
in `s.diagonal().fill_(3); s[1:] = s[:-1].clone()` rows were read after they were overwritten.
"""

from __future__ import annotations

import itertools
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
    advisory="AOTC-2026-0013",
    operators=WRITES,
    upstream="pytorch#198270",
    torch=">=2.11,<2.15",
    targets=("torch._inductor.scheduler:Scheduler.fusable_weak_dep(weak_dep, node1, node2)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, a kernel is fused with one that writes its inputs only if both access the same elements in
    order."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.scheduler import ForeachKernelSchedulerNode, Scheduler

    fusable = Scheduler.fusable_weak_dep

    def fusable_in_memory(self: Any, weak_dep: Any, node1: Any, node2: Any) -> bool:
        if not fusable(self, weak_dep, node1, node2):
            return False
        names = self.mutation_real_name
        (write,) = (dep for dep in node2.read_writes.writes if dep.name == weak_dep.mutating_buf)
        parts = node1.snodes if isinstance(node1, ForeachKernelSchedulerNode) else [node1]
        reads = [
            [dep for dep in part.read_writes.reads if names.get(dep.name, dep.name) == names[weak_dep.mutating_buf]]
            for part in parts
        ]
        return (
            set(write.var_names) <= write.index.free_symbols  # no element is written twice
            and sum(map(bool, reads)) <= 1
            and all(
                isinstance(dep, MemoryDep) and (dep.index, dep.size) == (write.index, write.size)
                for dep in itertools.chain(*reads)
            )
        )

    with replaced(Scheduler, "fusable_weak_dep", fusable_in_memory):
        yield


def reproduce(patches: Torch) -> None:
    def function(last: Tensor, x: Tensor) -> Tensor:
        last.diagonal().fill_(3)
        last[1:] = last[:-1].clone()
        last[0] = -2
        return x * 2

    assert_same(patches.compiled, function, torch.arange(64.0).view(4, 16), torch.randn(2))
