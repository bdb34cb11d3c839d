"""[inductor] A checked condition on values after a write does not build.

Expected: eager's result. Seen: `TypeError: unsupported operand type(s) for -: 'Equality' and 'Equality'`: after memory
is reused, `_is_fake_tensor_same` asks whether two conditions are equal by `sympy.Eq`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="build",
    torch=">=2.13,<2.15",
    targets=("torch._inductor.fx_utils:_is_fake_tensor_same(new, old, ...)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, two conditions are the same where their expressions are."""
    from torch._inductor import fx_utils

    is_same: Any = fx_utils._is_fake_tensor_same

    def same(new: Any, old: Any, *args: Any, **kwargs: Any) -> bool:
        if isinstance(new, torch.SymBool) and isinstance(old, torch.SymBool):
            return bool(new.node.expr == old.node.expr)
        return bool(is_same(new, old, *args, **kwargs))

    with replaced(fx_utils, "_is_fake_tensor_same", same):
        yield


def reproduce(patches: Torch) -> None:
    check: Any = torch._check

    def function(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[0] = x[1]
        check((y >= 0).all().item())
        return y + 1

    assert_same(patches.library, function, torch.rand(2, 8))
