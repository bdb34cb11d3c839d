"""[inductor][cpu] A vector of bools within a scalar condition does not compile.

Expected: `create_block_mask` of a mask that reads a tensor (`k <= lengths[b]`) compiles. Seen: `error: operands to
'?:' have different types 'VecMask<long int, 2>' and 'VecMask<float, 1>'`. `masked` takes the bools of its body to be
a `VecMask<float, N>`, which those of a comparison of integers are not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="build",
    torch=">=2.11,<2.15",
    device="cpu",
    targets=("torch._inductor.codegen.cpp:CppVecOverrides.masked(mask,body,other)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, vectors of bools leave the body of `masked` in the form in which it takes them."""
    from torch._inductor.codegen.cpp import CppVecOverrides

    masked: Any = CppVecOverrides.masked

    def masked_in_one_form(mask: Any, body: Callable[[], Any], other: Any) -> Any:
        return masked(mask, lambda: _as_mask_of_floats(body()), other)

    return replaced(CppVecOverrides, "masked", masked_in_one_form)


def _as_mask_of_floats(result: Any) -> Any:
    from torch._inductor.virtualized import V

    if result.dtype != torch.bool or not result.is_vec:
        return result
    cast = V.kernel.cse.generate(V.kernel.compute, V.kernel._get_mask_cast(result, torch.float), dtype=torch.bool)
    cast.update_on_args("to_dtype", (result,), {})
    return cast


def reproduce(patches: Torch) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    def blocks(lengths: torch.Tensor) -> torch.Tensor:
        def of_length(batch: Any, head: Any, row: Any, column: Any) -> Any:
            return column <= lengths[batch]

        return create_block_mask(of_length, 2, None, 16, 1024, device="cpu").to_dense()

    assert_same(patches.compiled, blocks, torch.tensor([300, 700]))
