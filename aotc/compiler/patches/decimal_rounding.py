"""[inductor] `round(x, 2)` in C++ rounds the product with 100.

Expected: 0.03 for 0.025, whose nearest double is above it. Seen: 0.02 from `nearbyint(1e2 * x) * 1e-2`
(`CppPrinter._print_RoundDecimal`).
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0007",
    operators=("builtins.round",),
    only=("range",),
    targets=("torch.utils._sympy.printers:CppPrinter._print_RoundDecimal(expr)",),
)

_ROUND = """[](double x, double p) {
    const double y = x OPERATION p, low = std::floor(y), error = REMAINDER;
    return (y - low != 0.5 || error == 0 ? std::nearbyint(y) : error > 0 ? low + 1 : low) INVERSE p;
}"""


@contextmanager
def apply() -> Iterator[None]:
    """While active, C++ rounds the number itself to decimal digits, not its rounded product with a power of ten."""
    from torch.utils._sympy.printers import CppPrinter

    def print_decimal(self: Any, expr: Any) -> str:
        number, digits = expr.args
        operation, inverse, remainder = "*/", "/*", ("std::fma(x, p, -y)", "std::fma(-y, p, x)")
        negative = int(digits) < 0
        function = _ROUND.replace("OPERATION", operation[negative]).replace("INVERSE", inverse[negative])
        power = f"1e{abs(int(digits))}"
        return f"{function.replace('REMAINDER', remainder[negative])}({self._print(number)}, {power})".replace("\n", "")

    with replaced(CppPrinter, "_print_RoundDecimal", print_decimal):
        yield


def reproduce(patches: Torch) -> None:
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy.functions import IntTrueDiv, RoundDecimal
    from torch.utils._sympy.printers import CppPrinter

    size = sympy.Symbol("size", integer=True)
    with patches.patched("compile"):
        text = CppPrinter().doprint(RoundDecimal(IntTrueDiv(size, 40), 2))
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "rounded.cpp"), Path(folder, "rounded.so")
        code = f'extern "C" double rounded(int64_t size) {{ return {text}; }}\n'
        source.write_text(f"#include <cmath>\n#include <cstdint>\n{code}")
        subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
        function = ctypes.CDLL(str(library)).rounded
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_int64]
        assert [function(n) for n in range(100)] == [round(n / 40, 2) for n in range(100)]
