"""Conditions on a size that hold for all sizes of its range, found by trying each.

Where the model's code, or an operator's, asks something of a size, torch.export proves the answer from the range's ends
or keeps it as a guard; a guard that it cannot take apart it refuses, whether or not some size violates it. Attention on
GPUs pads its mask to a multiple of 8 and then asks whether `seq * (8 + seq - seq % 8) > 1`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

NOT_PROVED = "satisfy the generated guard"
"""What torch.export says of a condition that it can neither prove nor take apart."""

MOST_SIZES = 1 << 14
"""In a range of which each is tried: three seconds' work for one condition at most."""


@contextmanager
def ranges_tried() -> Iterator[None]:
    """Within, torch.export takes a condition on one size for settled where all sizes of its range agree on it."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    evaluate: Any = ShapeEnv._maybe_evaluate_static

    @functools.wraps(evaluate)  # with `cache_clear`, which torch calls where a range becomes narrower
    def evaluate_or_try(self: Any, expression: Any, **asked: Any) -> Any:
        found = evaluate(self, expression, **asked)
        # Asked when it comes up, and, without axioms, in the end: by then sizes that are one dim are one symbol.
        if found is None and asked.keys() <= {"size_oblivious", "axioms"} and not asked.get("axioms"):
            return _settled(self.simplify(expression), self.var_to_range)
        return found

    with mock.patch.object(ShapeEnv, "_maybe_evaluate_static", evaluate_or_try):
        yield


def _settled(expression: Any, ranges: Any) -> Any:
    """`sympy.true` or `sympy.false` where each size gives it, otherwise None."""
    import sympy  # type: ignore[import-untyped]

    if not isinstance(expression, sympy.logic.boolalg.Boolean) or len(expression.free_symbols) != 1:
        return None
    (size,) = expression.free_symbols
    if size not in ranges:
        return None
    lower, upper = ranges[size].lower, ranges[size].upper
    if not (lower.is_Integer and upper.is_Integer and upper - lower < MOST_SIZES):
        return None
    settled = None
    for value in range(int(lower), int(upper) + 1):
        try:
            answer = expression.xreplace({size: sympy.Integer(value)})
        except (ArithmeticError, ValueError):  # the condition says nothing of this size
            return None
        if answer not in (sympy.true, sympy.false) or settled not in (None, answer):
            return None
        settled = answer
    return settled
