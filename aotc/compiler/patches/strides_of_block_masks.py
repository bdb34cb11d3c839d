"""[inductor] FlexAttention on a GPU reads a block mask that the graph makes at other places.

Expected: what eager computes. Seen, on an H100 with torch 2.11: other values for every sequence but the first, or an
illegal memory access. The templates take block masks as contiguous, and find that of a sequence by the stride of the
axis of heads: `stride("KV_NUM_BLKS", 1)`. That axis has one element in `create_block_mask(mask_mod, B, None, …)`, so
that Inductor may give it any stride. Up to torch 2.14, full blocks are read by the strides of the others, too.

    q = torch.randn(4, 4, 512, 64, device="cuda")
    documents = torch.randint(0, 3, (4, 512), device="cuda")


    @torch.compile
    def attend(q, documents):
        def within(b, h, row, column):
            return documents[b, row] == documents[b, column]

        return flex_attention(q, q, q, block_mask=create_block_mask(within, 4, None, 512, 512))
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced_entries
from aotc.compiler.patches.shared.inductor import inductor

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0036",
    complete=True,
    device="cuda",
    targets=(
        "torch._inductor.lowering:lowerings[higher_order.flex_attention]",
        "torch._inductor.lowering:lowerings[higher_order.flex_attention_backward]",
    ),
    operators=("higher_order.flex_attention",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, the tensors of a block mask are contiguous, and their axes of one element have such strides."""
    table = inductor("lowering").lowerings
    operators = [entry for entry in table if str(entry) in ("flex_attention", "flex_attention_backward")]
    return replaced_entries(table, {entry: _with_contiguous_masks(table[entry]) for entry in operators})


def _with_contiguous_masks(lower: Callable[..., Any]) -> Callable[..., Any]:
    subgraph = inductor("ir").Subgraph

    def is_block_mask(value: Any) -> bool:  # its last part is the graph of `mask_mod`
        return isinstance(value, list | tuple) and bool(value) and isinstance(value[-1], subgraph)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        return lower(*(tuple(map(_contiguous, arg)) if is_block_mask(arg) else arg for arg in args), **kwargs)

    return lowered


def _contiguous(part: Any) -> Any:
    ir = inductor("ir")
    if not isinstance(part, ir.TensorBox):
        return part
    storage, layout = ir.as_storage_and_layout(ir.ExternKernel.require_contiguous(part))
    strides = ir.FlexibleLayout.contiguous_strides(layout.size)
    as_it_lies = ir.FixedLayout(layout.device, layout.dtype, layout.size, strides, layout.offset)
    return ir.TensorBox(ir.ReinterpretView(data=storage, layout=as_it_lies))
