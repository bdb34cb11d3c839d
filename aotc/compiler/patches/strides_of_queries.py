"""[inductor] FlexAttention of fewer than 128 rows on a GPU reads a query with other strides than it has.

Expected: what eager computes. Seen, on an H200 with torch 2.11: other values, where the query has two rows or more and
is computed from a transposed tensor, as by rotary embeddings. `create_flex_decoding_kernel` reads the strides of the
query while its layout is flexible: they are those of a contiguous tensor. Then it makes a view by `as_strided`, which
decides the layout: that of the tensor that the query is computed from. The view keeps the strides that were read.

    x = torch.randn(1, 32, 8 * 64, device="cuda")
    key = torch.randn(1, 8, 256, 64, device="cuda")


    @torch.compile
    def attend(x, key):
        query = x.view(1, 32, 8, 64).transpose(1, 2) * 1.5
        return flex_attention(query, key, key)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.shared.inductor import inductor

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0054",
    complete=True,
    torch=">=2.11,<2.15",
    device="cuda",
    targets=("torch._inductor.kernel.flex.flex_attention:create_flex_decoding_kernel(*args, **kwargs)",),
    operators=("higher_order.flex_attention",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, the layout of the query is decided before its strides are read."""
    lowering = inductor("kernel.flex.flex_attention")
    ir = inductor("ir")
    create = lowering.create_flex_decoding_kernel

    def create_flex_decoding_kernel(query: Any, *args: Any, **kwargs: Any) -> Any:
        query = ir.ExternKernel.realize_input(query)
        ir.as_storage_and_layout(query)
        return create(query, *args, **kwargs)

    return replaced(lowering, "create_flex_decoding_kernel", create_flex_decoding_kernel)
