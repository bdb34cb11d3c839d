"""Comparisons of bools that are known at compile time: `mask == True`, where `mask` is all ones.

Inductor tracks the ranges of a kernel's expressions, and for such a comparison asks which bool is smaller. sympy has no
order of bools: the build failed (torch 2.11, 2.13; 2.14 compares them as here).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def known_bools_are_compared() -> Iterator[None]:
    """While active, ranges of bools are compared as ranges of 0 and 1."""
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
