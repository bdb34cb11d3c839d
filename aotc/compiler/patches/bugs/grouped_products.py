"""Grouped matrix products, which a mixture of experts is made of, with torch 2.11.

AOTInductor calls a C function of torch's for them, which came with torch 2.12: before, no such wrapper compiles. So
there the operator is called by its name, as those are that have no C function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def grouped_products_are_called() -> Iterator[None]:
    """Within, the operator races with templates as always; where it wins, it is called as this torch can."""
    from torch._inductor.kernel import mm_grouped

    choice: Any = mm_grouped.aten__grouped_mm
    with mock.patch.object(choice, "use_fallback_kernel", True):
        yield
