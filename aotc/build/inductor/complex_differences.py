"""Differences of complex numbers.

Inductor has a sum of complex numbers, and leaves a difference to torch's operator, which a library calls by name and
gives one argument more than it takes: such a call fails (torch 2.13). `x - y` is `x + -1 * y`, to the last bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.build.inductor.decomposed import decomposed


def complex_differences_are_sums() -> AbstractContextManager[None]:
    """A context in which a difference with a complex number is compiled as a sum."""
    return decomposed({torch.ops.aten.sub.Tensor: _difference})


def _difference(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    if not any(isinstance(value, Tensor) and value.is_complex() for value in (x, y)):
        return NotImplemented
    return torch.add(x, y, alpha=-alpha)
