"""Conditions on values that a model checks: `torch._check((x >= 0).all().item())`.

After memory is reused, Inductor asks of each node whether its metadata has changed. For that it subtracts one condition
from the other, and sympy does not subtract bools: the build failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def conditions_are_compared() -> Iterator[None]:
    """While active, two conditions are the same where their expressions are."""
    from torch._inductor import fx_utils

    is_same: Any = fx_utils._is_fake_tensor_same

    def same(new: Any, old: Any, *args: Any, **kwargs: Any) -> bool:
        if isinstance(new, torch.SymBool) and isinstance(old, torch.SymBool):
            return bool(new.node.expr == old.node.expr)
        return bool(is_same(new, old, *args, **kwargs))

    with mock.patch.object(fx_utils, "_is_fake_tensor_same", same):
        yield
