"""[inductor][cpu] The absolute value of int8 and int16 does not compile in scalar code that reduces it.

Expected: `x.abs().amax()` of int16 builds. Seen: `std::abs` gives an int, and `max_propagate_nan` takes two values of
one type.
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
    device="cpu",
    targets=("torch._inductor.codegen.cpp:CppOverrides.abs(x)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, an absolute value has the type of its argument."""
    from torch._inductor.codegen.cpp import CppOverrides

    absolute: Any = CppOverrides.abs

    def abs(x: Any) -> str:
        short = getattr(x, "dtype", None) in (torch.int8, torch.int16)
        return f"decltype({x})({absolute(x)})" if short else str(absolute(x))

    return replaced(CppOverrides, "abs", abs)


def reproduce(patches: Torch) -> None:
    assert_same(patches.compiled, lambda x: x.abs().amax(), torch.arange(-9, 5, dtype=torch.int16))
