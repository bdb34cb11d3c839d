"""[inductor][cpu] A range of int64 with a large step overflows in vectorised code.

Expected: `torch.arange(11) * 10**9` is eager's. Seen: -1294967296 in the place of 3000000000: the step is written as an
int, and a vector's `arange` multiplies it by 2 and more in that type.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.operators import INTEGERS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0045",
    operators=("aten.arange", "prims.iota", "aten.linspace"),
    dtypes=INTEGERS,
    device="cpu",
    targets=("torch._inductor.codegen.cpp:CppVecKernel.arange(index, stride)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, the steps of vectors are of 64 bits."""
    from torch._inductor.codegen.cpp import CppVecKernel

    make: Any = CppVecKernel.arange

    def arange(self: Any, index: Any, stride: Any) -> Any:
        return make(self, index, f"static_cast<int64_t>({stride})")

    return replaced(CppVecKernel, "arange", arange)


def reproduce(patches: Torch) -> None:
    assert_same(patches.compiled, lambda x: (torch.arange(11) * 10**9, x + 1), torch.zeros(3))
