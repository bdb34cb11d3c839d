"""A number that is assigned to one element: `y[0, 0] = 1`.

The number is a constant of the graph without axes. Inductor gives an assigned value the axes of what it is assigned to,
and before torch 2.15 cannot do that with such a constant: the build failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def numbers_are_assigned() -> Iterator[None]:
    """Within, a constant without axes can be given some."""
    from torch._inductor import ir, lowering

    view: Any = lowering.view

    def view_of(value: Any, sizes: Any) -> Any:
        if isinstance(value, ir.Constant):
            value = lowering.full([], value.value, dtype=value.dtype, device=value.device)
        return view(value, sizes)

    with mock.patch.object(lowering, "view", view_of):
        yield
