"""A comparison of bools that are known when the kernel is made: `mask == True`, where `mask` is all ones.

Inductor follows what values a kernel's expressions can take, and asks of such a comparison which bool is the smaller.
sympy has no order of bools: the build failed (torch 2.11, 2.13; 2.14 compares them so, too).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def known_bools_are_compared() -> Iterator[None]:
    """Within, two ranges of bools are compared as those of 0 and 1 are."""
    from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis, ValueRanges

    analysis: Any = SymPyValueRangeAnalysis
    equal = analysis.eq

    def numbers(given: Any) -> Any:
        bounds: Any = ValueRanges.wrap(given)
        return analysis._bool_to_int(bounds) if bounds.is_bool else bounds

    def eq(a: Any, b: Any) -> Any:
        return equal(numbers(a), numbers(b))

    with mock.patch.object(analysis, "eq", staticmethod(eq)):
        yield
