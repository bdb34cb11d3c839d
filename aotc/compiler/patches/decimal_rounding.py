"""[inductor] `round(x, 2)` in C++ rounds the product with 100.

Expected: 0.03 for 0.025, whose nearest double is above it. Seen: 0.02 from `nearbyint(1e2 * x) * 1e-2`
(`CppPrinter._print_RoundDecimal`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from aotc.compiler.patches.machinery.patch import Patch

PATCH = Patch(__name__, targets=("torch.utils._sympy.printers:CppPrinter._print_RoundDecimal(expr)",))

_ROUND = """[](double x, double p) {
    const double y = x OPERATION p, low = std::floor(y), error = REMAINDER;
    return (y - low != 0.5 || error == 0 ? std::nearbyint(y) : error > 0 ? low + 1 : low) INVERSE p;
}"""


@contextmanager
def apply() -> Iterator[None]:
    """While active, C++ rounds the number itself to decimal digits, not its rounded product with a power of ten."""
    from torch.utils._sympy.printers import CppPrinter

    def print_decimal(self: Any, expression: Any) -> str:
        number, digits = expression.args
        operation, inverse, remainder = "*/", "/*", ("std::fma(x, p, -y)", "std::fma(-y, p, x)")
        negative = int(digits) < 0
        function = _ROUND.replace("OPERATION", operation[negative]).replace("INVERSE", inverse[negative])
        power = f"1e{abs(int(digits))}"
        return f"{function.replace('REMAINDER', remainder[negative])}({self._print(number)}, {power})".replace("\n", "")

    with mock.patch.object(CppPrinter, "_print_RoundDecimal", print_decimal):
        yield
