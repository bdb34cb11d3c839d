"""Differences of complex numbers.

Inductor has a sum of complex numbers, and leaves a difference to torch's operator, which a library calls by name and
gives one argument more than it takes: such a call fails (torch 2.13). `x - y` is `x + -1 * y`, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@contextmanager
def complex_differences_are_sums() -> Iterator[None]:
    """Within, a difference with a complex number is compiled as a sum."""
    from torch._inductor import decomposition

    operator = torch.ops.aten.sub.Tensor
    tables: Any = (decomposition.decompositions, decomposition.fast_random_decomps())

    def difference(x: Any, y: Any, *, alpha: Any = 1) -> Any:
        if not any(isinstance(value, Tensor) and value.is_complex() for value in (x, y)):
            return NotImplemented
        return torch.add(x, y, alpha=-alpha)

    with mock.patch.dict(tables[0], {operator: difference}), mock.patch.dict(tables[1], {operator: difference}):
        yield
