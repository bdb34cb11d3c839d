"""[inductor][cpu] A mask of FlexAttention that reads a tensor of symbolic sizes does not compile.

Expected: `lambda b, h, q, k: documents[b, q] == documents[b, k]` compiles where `documents` has a range of lengths.
Seen: `error: 'ks2' was not declared in this scope`: the kernel is given the sizes of query, key and value, but not
those of the tensors that its mask reads. And names are replaced within others: `ks2` within `ks26`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="build",
    complete=True,
    device="cpu",
    targets=(
        "torch._inductor.codegen.cpp_flex_attention_template:CppFlexAttentionTemplate.__init__(input_nodes,...)",
        "torch._inductor.codegen.cpp_flex_attention_template:CppFlexAttentionTemplate.modification(subgraph_buffer,...)",
    ),
    operators=("higher_order.flex_attention",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, the sizes and strides of all captured tensors are arguments of the kernel."""
    import sympy  # type: ignore[import-untyped]
    import torch._inductor.lowering  # noqa: F401  (the template alone cannot be imported first)
    from torch._inductor.codegen.cpp_flex_attention_template import CppFlexAttentionTemplate

    init: Any = CppFlexAttentionTemplate.__init__
    modification: Any = CppFlexAttentionTemplate.modification

    def with_sizes_of_captures(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        known = dict.fromkeys(self.extra_sizevars)
        for captured in self.kernel_input_name_to_buffer.values():
            if not isinstance(captured, sympy.Expr):
                numbers = (*captured.get_size(), *captured.get_stride())
                symbols = set().union(*(sympy.sympify(number).free_symbols for number in numbers))
                known.update(dict.fromkeys(sorted(symbols, key=str)))
        self.extra_sizevars = list(known)

    def with_names_of_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(self, "extra_sizevars", [*self.extra_sizevars, *self.block_vars]):
            return modification(self, *args, **kwargs)

    with (
        replaced(CppFlexAttentionTemplate, "__init__", with_sizes_of_captures),
        replaced(CppFlexAttentionTemplate, "modification", with_names_of_blocks),
    ):
        yield


def reproduce(patches: Torch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attention(query: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        def closer(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
            return score + (documents[batch, row] == documents[batch, column])

        result: torch.Tensor = flex_attention(query, query + 1, query + 2, score_mod=closer)
        return result

    def inputs(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(2, 4, tokens, 16), torch.randint(0, 3, (2, tokens))]

    tokens = torch.export.Dim("tokens", min=16, max=512)
    run = patches.library(attention, *inputs(64), shapes=[{2: tokens}, {1: tokens}])
    given = inputs(200)
    torch.testing.assert_close(run(*given)[0], attention(*given))
