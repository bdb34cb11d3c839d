"""Neighbours of matrix products that Inductor overlooks on GPUs, as candidates of fusion.

A product writes `[rows, columns]`; what follows a linear layer reads `[batch, seq, columns]`: the same elements in the
same order. On GPUs Inductor of torch 2.11 merges such loops only after it has fused kernels, and in deciding on fusions
it compares what two kernels read and write loop by loop. So it finds nothing shared and asks no further, unless batch
is 1. With merged loops compared, the fusion is raced like any other. Inductor of torch 2.13 compares their buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def neighbours_of_any_shape_offered() -> Iterator[None]:
    """Let a template and what it shares elements with be fused, however many dimensions they count them in."""
    from torch._inductor.scheduler import Scheduler

    score: Any = Scheduler.score_fusion_memory

    def score_merged(self: Any, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> Any:
        found = score(self, node1, node2, *args, **kwargs)
        shared, *more = found if isinstance(found, tuple) else (found,)
        if shared or node1.is_template() == node2.is_template():
            return found
        shared = sum(self.dep_size_hint(dep) for dep in _with_merged_loops(node1) & _with_merged_loops(node2))
        return (shared, *more) if isinstance(found, tuple) else shared

    with mock.patch.object(Scheduler, "score_fusion_memory", score_merged):
        yield


def _with_merged_loops(node: Any) -> set[Any]:
    from torch._inductor.dependencies import MemoryDep

    return {dep.normalize() for dep in node.read_writes.reads_and_writes() if isinstance(dep, MemoryDep)}
