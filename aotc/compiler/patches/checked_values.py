"""[inductor] A checked condition on values after a write does not build.

Expected: eager's result. Seen: `TypeError: unsupported operand type(s) for -: 'Equality' and 'Equality'`: after memory
is reused, `_is_fake_tensor_same` asks whether two conditions are equal by `sympy.Eq`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from aotc.compiler.patches.machinery.patch import Patch

PATCH = Patch(__name__, torch=">=2.13,<2.15", targets=("torch._inductor.fx_utils:_is_fake_tensor_same(new, old, ...)",))


@contextmanager
def apply() -> Iterator[None]:
    """While active, two conditions are the same where their expressions are."""
    from torch._inductor import fx_utils

    is_same: Any = fx_utils._is_fake_tensor_same

    def same(new: Any, old: Any, *args: Any, **kwargs: Any) -> bool:
        if isinstance(new, torch.SymBool) and isinstance(old, torch.SymBool):
            return bool(new.node.expr == old.node.expr)
        return bool(is_same(new, old, *args, **kwargs))

    with mock.patch.object(fx_utils, "_is_fake_tensor_same", same):
        yield
