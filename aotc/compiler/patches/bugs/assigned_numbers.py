"""Assigning a number to one element: `y[0, 0] = 1`.

The number is a constant of the graph without axes. Inductor reshapes an assigned value to its destination, and before
torch 2.15 cannot do so with such a constant: the build failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def numbers_are_assigned() -> Iterator[None]:
    """While active, a constant without axes can be reshaped."""
    from torch._inductor import ir, lowering

    view: Any = lowering.view

    def view_of(value: Any, sizes: Any) -> Any:
        if isinstance(value, ir.Constant):
            value = lowering.full([], value.value, dtype=value.dtype, device=value.device)
        return view(value, sizes)

    with mock.patch.object(lowering, "view", view_of):
        yield
