"""Indices that are remainders, with the signs that C++ gives them."""

from __future__ import annotations

import math
from itertools import product

import pytest
import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from aotc.compiler.patches import negative_remainders


def in_cpp(index: sympy.Expr, values: dict[sympy.Symbol, int]) -> int:
    """The value of an index in generated C++, where `%` has the sign of its left side."""
    if not index.args:
        return values[index] if index.is_Symbol else int(index)
    arguments = [in_cpp(argument, values) for argument in index.args]
    if index.func is ModularIndexing:
        base, divisor, modulus = arguments
        return int(math.fmod(base // divisor, modulus))
    if index.func is FloorDiv:
        return arguments[0] // arguments[1]
    return sum(arguments) if index.is_Add else math.prod(arguments)


@pytest.mark.parametrize("repeats", [2, 3])
def test_a_repetition_that_is_flipped_stays_in_its_tensor(repeats: int) -> None:
    rows, columns = sympy.symbols(f"rows{repeats} columns{repeats}", integer=True, positive=True)
    at = sympy.Symbol(f"at{repeats}", integer=True, nonnegative=True)
    size = rows * columns
    with negative_remainders.apply():
        flipped = repeats * size - 1 - at
        indices = [ModularIndexing(FloorDiv(flipped, repeats), 1, size), ModularIndexing(flipped, repeats, size)]
        kept = ModularIndexing(size * 4 + at, 1, size)
    assert kept == ModularIndexing(at, 1, size)  # of what is not negative, multiples are dropped as before
    for a, b in product((4, 5), (4, 7)):
        for index, x in product(indices, range(repeats * a * b)):
            expected = (repeats * a * b - 1 - x) // repeats
            assert in_cpp(index, {rows: a, columns: b, at: x}) == expected
