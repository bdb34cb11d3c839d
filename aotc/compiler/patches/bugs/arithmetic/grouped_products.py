"""Grouped matrix products, as in a mixture of experts, with torch 2.11.

AOTInductor calls a C function of torch for them, which exists from torch 2.12 on: before, such a wrapper does not
compile. So the operator is called by its name, like operators without a C function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def grouped_products_are_called() -> Iterator[None]:
    """While active, the operator races with templates as usual, and if it wins, it is called by its name."""
    from torch._inductor.kernel import mm_grouped

    choice: Any = mm_grouped.aten__grouped_mm
    with mock.patch.object(choice, "use_fallback_kernel", True):
        yield
