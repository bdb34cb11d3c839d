"""[inductor] A comparison of bools that are known at compile time does not build.

Such as `mask == True`, where `mask` is all ones: Inductor tracks the ranges of a kernel's expressions, and for a
comparison asks which bool is smaller. sympy has no order of bools. torch 2.14 compares them as numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="build",
    upstream="pytorch#188231",
    torch=">=2.11,<2.14",
    targets=("torch.utils._sympy.value_ranges:SymPyValueRangeAnalysis.eq(a, b)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, ranges of bools are compared as ranges of 0 and 1."""
    from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis, ValueRanges

    analysis: Any = SymPyValueRangeAnalysis
    equal = analysis.eq

    def numbers(given: Any) -> Any:
        bounds: Any = ValueRanges.wrap(given)
        return analysis._bool_to_int(bounds) if bounds.is_bool else bounds

    def eq(a: Any, b: Any) -> Any:
        return equal(numbers(a), numbers(b))

    with replaced(analysis, "eq", eq):
        yield


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        ones = ~torch.zeros(x.shape[0], 3).to(torch.bool)
        return torch.where(ones == True, x, -x)  # noqa: E712

    shapes = [{0: torch.export.Dim("rows", min=2, max=8)}]
    x = torch.randn(4, 3)
    torch.testing.assert_close(patches.library(function, x, shapes=shapes)(x)[0], function(x))
