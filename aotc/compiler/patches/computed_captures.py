"""[inductor][cpu] A mask of FlexAttention that reads a tensor which the graph computes does not build.

Expected: `lambda b, h, q, k: k <= ends[b]` builds where `ends = lengths + 1`, as it does where `ends` is an input;
and so do the masks of transformers. Seen: `NoValidChoicesError: No choices exist for backend`, beneath which lies
`NotImplementedError: Pointwise`. `lower_cpu` stores such a tensor only after it has asked for its name.
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
    severity="build",
    complete=True,
    device="cpu",
    targets=(
        "torch._inductor.kernel.flex.flex_attention:"
        "lower_cpu(query,key,value,subgraph,block_mask,scale,kernel_options,score_mod_other_buffers,mask_mod_other_buffers)",
    ),
    operators=("higher_order.flex_attention",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, all tensors that a score or a mask reads are stored first."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.kernel.flex import flex_attention

    lower_cpu: Any = flex_attention.lower_cpu  # type: ignore[attr-defined]

    def lower_with_stored_captures(*args: Any) -> Any:
        for captured in (*args[-2], *args[-1]):
            if isinstance(captured, TensorBox):  # and not a size
                captured.realize()
        return lower_cpu(*args)

    return replaced(flex_attention, "lower_cpu", lower_with_stored_captures)


def reproduce(patches: Torch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attention(query: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        larger, least = scales + 1, scales.amin() + 1

        def scaled(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
            return score * larger[column] + least

        result: torch.Tensor = flex_attention(query, query + 1, query + 2, score_mod=scaled)
        return result

    assert_same(patches.compiled, attention, torch.randn(2, 4, 32, 16), torch.rand(32))
