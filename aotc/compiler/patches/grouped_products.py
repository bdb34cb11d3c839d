"""[AOTInductor] A grouped matrix product, as in a mixture of experts, does not build with torch 2.11.

AOTInductor calls a C function of torch for it, which exists from torch 2.12 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="build",
    complete=True,
    upstream="pytorch#177307",
    torch=">=2.11,<2.12",
    operators=("aten._grouped_mm",),
    targets=("torch._inductor.kernel.mm_grouped:aten__grouped_mm.use_fallback_kernel",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, the operator races with templates as usual, and if it wins, it is called by its name, like
    operators without a C function.
    """
    from torch._inductor.kernel import mm_grouped

    choice: Any = mm_grouped.aten__grouped_mm
    with mock.patch.object(choice, "use_fallback_kernel", True):
        yield


def reproduce(patches: Torch) -> None:
    tokens, weights = torch.randn(12, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16()
    ends = torch.tensor([2, 8, 12], dtype=torch.int32)
    assert_same(patches.library, lambda t, w, e: torch._grouped_mm(t * 2, w, offs=e) + 1, tokens, weights, ends)
