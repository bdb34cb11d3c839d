"""Arithmetic on sizes of a range, where torch's result differs from Python's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from aotc.errors import BuildError

_EXACT = 1 << 20
"""With a divisor of at most this numerator and denominator, no quotient of a size is rounded up to an integer."""

_ROUND = """[](double x, double p) {
    const double y = x OPERATION p, low = std::floor(y), error = REMAINDER;
    return (y - low != 0.5 || error == 0 ? std::nearbyint(y) : error > 0 ? low + 1 : low) INVERSE p;
}"""


def sizes_round_to_tens() -> AbstractContextManager[Any]:
    """While active, `round(size, -1)` is a multiple of 10; torch returns the size itself."""

    def rounded(self: Any, ndigits: int | None = None) -> Any:
        return self if ndigits is None or ndigits >= 0 else _to_multiple(self, 10**-ndigits)

    return mock.patch.object(torch.SymInt, "__round__", rounded)


@contextmanager
def rounded_quotients_are_refused() -> Iterator[None]:
    """While active, `//` of a size by a number like 0.1 raises BuildError: torch rounds the quotient first, but 3 //
    0.1 is 29, and floor(3 / 0.1) is 30."""
    floor = {kind: kind.__floordiv__ for kind in (torch.SymInt, torch.SymFloat)}

    def divided(self: Any, other: Any) -> Any:
        if isinstance(other, float) and max(map(abs, other.as_integer_ratio())) > _EXACT:
            raise BuildError(
                f"a size of a range is divided by {other} with `//`, which is exact only for Python's numbers",
                hint="divide by an integer, or use `math.floor(size / number)`, which rounds the quotient first",
            )
        return floor[type(self)](self, other)

    with (
        mock.patch.object(torch.SymInt, "__floordiv__", divided),
        mock.patch.object(torch.SymFloat, "__floordiv__", divided),
    ):
        yield


def _to_multiple(number: Any, of: int) -> Any:
    """The nearest multiple, ties to even, as in `round`; by operations that torch supports for sizes."""
    nearest = (2 * number + of) // (2 * of)  # ties go up
    from_odd = (2 * number + 3 * of) % (4 * of)  # 0 for a tie that went up to an odd multiple
    return (nearest - 1 + (from_odd + 4 * of - 1) // (4 * of)) * of


@contextmanager
def rounded_as_in_python() -> Iterator[None]:
    """While active, C++ rounds the number itself to decimal digits, not its rounded product with a power of ten:
    `round(0.025, 2)` is 0.03, since this float is above the decimal number."""
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
