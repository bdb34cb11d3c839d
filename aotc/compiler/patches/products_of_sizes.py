"""[export] A size that is the product of three others cannot be traced.

Expected: a program whose tensors have `batch * rows * columns` elements is exported, whatever made the number. Seen:
`TypeError: mul expected 2 arguments, got 3`, where FakeTensor's cache has computed the number.
`_build_proxy_for_sym_expr` calls `operator.mul` with all factors of `sympy.Mul`. The sum has been mended
(pytorch#175398); the product is like it.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="build",
    torch=">=2.11,<2.15",
    stage="export",
    targets=("torch.fx.experimental.proxy_tensor:_build_proxy_for_sym_expr(tracer,expr,out)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, a product of more than two factors is traced two factors at a time."""
    from torch.fx.experimental import proxy_tensor

    build = proxy_tensor._build_proxy_for_sym_expr
    register: Any = proxy_tensor._sym_register

    def build_proxy(tracer: Any, expr: Any, out: Any = None) -> Any:
        product = getattr(expr, "is_Mul", False) and len(expr.args) > 2 and expr not in tracer.sympy_expr_tracker
        if not product:
            return build(tracer, expr, out)
        factors = [build_proxy(tracer, factor) for factor in expr.args]
        if None in factors:
            return None
        *first, last = factors
        of_the_others = first[0]
        for factor in first[1:]:
            of_the_others = of_the_others * factor
        if out is None:
            return of_the_others * last
        register(tracer, operator.mul, (of_the_others, last), out)
        return out

    return replaced(proxy_tensor, "_build_proxy_for_sym_expr", build_proxy)


def reproduce(patches: Torch) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attention(query: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        def same_document(batch: Any, _: Any, row: Any, column: Any) -> Any:
            return documents[batch, row] == documents[batch, column]

        batch, _, tokens, _ = query.shape
        mask = create_block_mask(same_document, batch, None, tokens, tokens, device="cpu")
        result: torch.Tensor = flex_attention(query, query + 1, query + 2, block_mask=mask)
        return result

    batch = tokens = torch.export.Dim.AUTO
    inputs = [torch.randn(3, 2, 200, 16), torch.randint(0, 3, (3, 200))]
    exported = patches.exported(attention, inputs, [{0: batch, 2: tokens}, {0: batch, 1: tokens}])
    query, documents = torch.randn(4, 2, 300, 16), torch.randint(0, 3, (4, 300))
    torch.testing.assert_close(exported.module()(query, documents), attention(query, documents))
