"""Python's arithmetic of sizes of a range, in what torch makes of it: expressions, and C++ of them."""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import CppPrinter

from aotc.compiler.patches import decimal_rounding, floor_divided_sizes, rounded_sizes
from aotc.errors import BuildError

SIZES = range(2, 400)


@pytest.fixture
def size() -> Any:
    """A size of a range, as forward sees it while it is captured."""
    shapes, source = ShapeEnv(), ConstantSource("size")
    symbol = shapes.create_symbol(41, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    with rounded_sizes.apply(), floor_divided_sizes.apply():
        yield shapes.create_symintnode(symbol, hint=41, source=source)


def computed(traced: Any, size: Any, value: int) -> sympy.Expr:
    return traced.node.expr.subs(size.node.expr, value)


@pytest.mark.parametrize(
    "function",
    [
        *(lambda n, digits=digits: round(n, digits) for digits in (-1, -2, -3, 1)),
        lambda n: round(5 - n, -1),
        lambda n: round(2 * n + 1, -1) // 2,
        lambda n: round(n / 3, -1),
        lambda n: round(n / 40, 2),
        lambda n: round(n / 2),
        lambda n: math.floor(n / 7) + math.ceil(n / 6) + math.trunc((9 - n) / 5),
        lambda n: (5 - n) // 3 + (5 - n) % 3 + abs(5 - n),
        lambda n: n // 2.5 + n // 3.0,
    ],
)
def test_functions_of_a_size_are_pythons(function: Callable[[Any], Any], size: Any) -> None:
    traced = function(size)
    assert isinstance(traced, torch.SymInt | torch.SymFloat)  # for all sizes, not for that of the example
    assert [float(computed(traced, size, value)) for value in SIZES] == [float(function(value)) for value in SIZES]


@pytest.mark.parametrize("divide", [lambda n: n // 0.1, lambda n: n / 2 // 0.3])
def test_a_quotient_that_torch_would_round_first_is_refused(divide: Callable[[Any], Any], size: Any) -> None:
    with pytest.raises(BuildError, match=r"divided by 0\.[13] with `//`"):
        divide(size)


ROUNDED = [(40, 2), (8, 1), (8, 2), (7, 3), (0.01, -3), (0.2, -1), (16, 3)]


def test_decimal_digits_are_rounded_as_in_python(size: Any, tmp_path: Path) -> None:
    with decimal_rounding.apply():
        texts = [CppPrinter().doprint(round(size / by, digits).node.expr) for by, digits in ROUNDED]
    source, library = tmp_path / "rounded.cpp", tmp_path / "rounded.so"
    functions = (
        f'extern "C" double f{at}(int64_t {size.node.expr}) {{ return {text}; }}\n' for at, text in enumerate(texts)
    )
    source.write_text("#include <cmath>\n#include <cstdint>\n" + "".join(functions))
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    compiled = ctypes.CDLL(str(library))
    for at, (by, digits) in enumerate(ROUNDED):
        function = compiled[f"f{at}"]
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_int64]
        assert [function(value) for value in SIZES] == [round(value / by, digits) for value in SIZES]
