"""[inductor][cpu] FlexAttention of a view, or of a single token without full blocks, does not build.

Expected: `flex_attention(linear(x).view(batch, 1, heads, size).transpose(1, 2), key, value, block_mask=mask)` builds.
Seen: `ValueError: not enough values to unpack (expected 4, got 2)`: `choose_flex_template` reads the sizes of the
buffer below the view (`query.data.data.layout.size`) in place of the view's own. And with 512 keys or more, of fixed
sizes, and a mask that has `full_kv_num_blocks=None`: `error: 'full_kv_num_blocks' was not declared in this scope`,
since it chooses the template of flash decoding, which takes it for granted that there are full blocks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="build",
    complete=True,
    torch=">=2.13,<2.16",
    device="cpu",
    targets=(
        "torch._inductor.codegen.cpp_flex_attention_template:"
        "CppFlexAttentionTemplate.choose_flex_template(query,key,num_threads)",
    ),
    operators=("higher_order.flex_attention",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, the template is chosen by the views' own sizes, and is one that the mask suffices for."""
    import torch._inductor.lowering  # noqa: F401  (the template alone cannot be imported first)
    from torch._inductor.codegen.cpp_flex_attention_template import FLEX_ATTENTION_TEMPLATE, CppFlexAttentionTemplate

    choose = CppFlexAttentionTemplate.choose_flex_template

    def choose_flex_template(self: Any, query: Any, key: Any, num_threads: Any) -> Any:
        if self.no_full_kv_block:
            return FLEX_ATTENTION_TEMPLATE
        return choose(self, _of_own_sizes(query), _of_own_sizes(key), num_threads)

    return replaced(CppFlexAttentionTemplate, "choose_flex_template", choose_flex_template)


def _of_own_sizes(view: Any) -> Any:
    """What torch reads of an operand, `operand.data.data.layout.size`: with heads before rows, which are after here."""
    batch, rows, heads, size = view.get_size()
    layout = SimpleNamespace(size=[batch, heads, rows, size])
    return SimpleNamespace(data=SimpleNamespace(data=SimpleNamespace(layout=layout)))


def reproduce(patches: Torch) -> None:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    count = torch.tensor([[[3]]], dtype=torch.int32)
    blocks = torch.arange(8, dtype=torch.int32)[None, None, None]

    def of_length(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return column <= 300

    def attention(x: torch.Tensor, weight: torch.Tensor, key: torch.Tensor, full: bool) -> torch.Tensor:
        query = (x @ weight).view(2, 1, 4, 16).transpose(1, 2)
        sizes: Any = {"BLOCK_SIZE": (1, 128), "seq_lengths": (1, 1024), "compute_q_blocks": False}
        sizes["mask_mod"] = of_length
        more = (torch.zeros_like(count), blocks.flip(-1)) if full else ()
        mask = BlockMask.from_kv_blocks(count, blocks, *more, **sizes)
        result: torch.Tensor = flex_attention(query, key, key + 1, block_mask=mask)
        return result

    for full in (True, False):
        inputs = torch.randn(2, 64), torch.randn(64, 64), torch.randn(2, 4, 1024, 16), full
        assert_same(patches.compiled, attention, *inputs)
