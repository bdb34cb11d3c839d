"""Keep indices that are remainders within their tensor.

For a flipped repetition over a range, Inductor generates `(a*b + (-1 - x) // 2) % (a*b)`, and drops the first term, a
multiple of the modulus. The rest is negative, and so is its remainder in C++: a library reads memory before the tensor.
Inductor keeps the term if another one has a minus sign, but not if the sign is nested deeper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def remainders_are_not_negative() -> Iterator[None]:
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
