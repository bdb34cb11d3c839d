"""[inductor] `ModularIndexing` drops a term that keeps the sum from being negative.

Expected: an index within the tensor. Seen: for `(2*a*b - 1 - x) // 2 % (a*b)`, as in `x.repeat(2, 1).flip(0) * 1` with
both axes of a range, the term `a*b` is dropped, and C++'s remainder of the negative rest is negative: memory before the
tensor. The term is kept if another one has a minus sign, but not if the sign is nested deeper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from aotc.compiler.patches.machinery.patch import Patch

PATCH = Patch(
    __name__,
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

    with mock.patch.object(ModularIndexing, "eval", classmethod(simplify)):
        yield


def _has_minus(term: Any) -> bool:
    return bool(term.is_Number and term < 0) or any(map(_has_minus, term.args))
