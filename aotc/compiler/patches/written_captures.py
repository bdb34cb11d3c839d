"""[inductor] A mask of FlexAttention reads what a tensor held before it was written.

Expected: a `mask_mod` or `score_mod` that captures `torch.full((8,), -1).scatter(0, index, source)` reads what
`scatter` has written. Seen: it reads -1 everywhere, without an error: the subgraph of the mask has a list of its own
of the buffers that are written, which begins empty, so the constant that the buffer held first is inlined.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0038",
    complete=True,
    targets=("torch._inductor.subgraph_lowering:PointwiseSubgraphLowering.__init__(gm,root_graph_lowering,...)",),
    operators=("higher_order.",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, a subgraph knows the buffers that the graph around it writes."""
    from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering

    init = PointwiseSubgraphLowering.__init__

    def with_written_buffers(self: Any, gm: Any, root_graph_lowering: Any, *args: Any, **kwargs: Any) -> None:
        init(self, gm, root_graph_lowering, *args, **kwargs)
        self.mutated_buffers.update(root_graph_lowering.mutated_buffers)

    return replaced(PointwiseSubgraphLowering, "__init__", with_written_buffers)


def reproduce(patches: Torch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attention(query: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        rank = torch.full((32,), -1).scatter(0, order, torch.arange(32))

        def by_rank(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
            return score * rank[column]

        result: torch.Tensor = flex_attention(query, query + 1, query + 2, score_mod=by_rank)
        return result

    assert_same(patches.compiled, attention, torch.randn(2, 4, 32, 16), torch.randperm(32))
