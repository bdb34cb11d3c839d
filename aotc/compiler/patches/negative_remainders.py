"""[inductor] `ModularIndexing` drops a term that keeps the sum from being negative.

Expected: an index within the tensor. Seen: for `(2*a*b - 1 - x) // 2 % (a*b)`, as in `x.repeat(2, 1).flip(0) * 1` with
both axes of a range, the term `a*b` is dropped, and C++'s remainder of the negative rest is negative: memory before the
tensor. The term is kept if another one has a minus sign, but not if the sign is nested deeper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0021",
    only=("range",),
    torch=">=2.11,<2.14",
    targets=("torch.utils._sympy.functions:ModularIndexing.eval(base, divisor, modulus)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, a sum with a term that may be negative keeps all its terms in a remainder."""
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy.functions import ModularIndexing

    simplified: Any = ModularIndexing.eval

    def simplify(cls: Any, base: Any, divisor: Any, modulus: Any) -> Any:
        if isinstance(base, sympy.Add) and any(_has_minus(term) for term in base.args):
            return None
        return simplified(base, divisor, modulus)

    with replaced(ModularIndexing, "eval", simplify):
        yield


def _has_minus(term: Any) -> bool:
    return bool(term.is_Number and term < 0) or any(map(_has_minus, term.args))


def reproduce(patches: Torch) -> None:
    import sympy
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    rows, columns = sympy.symbols("rows columns", integer=True, positive=True)
    at = sympy.Symbol("at", integer=True, nonnegative=True)
    with patches.patched("compile"):
        index = ModularIndexing(FloorDiv(2 * rows * columns - 1 - at, 2), 1, rows * columns)

    def in_cpp(term: Any) -> int:
        """Where the sign of a remainder is that of its left side."""
        if not term.args:
            return {rows: 4, columns: 5, at: 1}[term] if term.is_Symbol else int(term)
        parts = [in_cpp(part) for part in term.args]
        if term.func is ModularIndexing:
            return int(math.fmod(parts[0] // parts[1], parts[2]))
        return parts[0] // parts[1] if term.func is FloorDiv else (sum if term.is_Add else math.prod)(parts)

    assert in_cpp(index) == (2 * 20 - 1 - 1) // 2
