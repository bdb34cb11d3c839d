"""Conditions on sizes that torch.export neither proves nor takes apart, decided by trying each size of their ranges."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from aotc.compiler.capture.range_solver import settled


@contextmanager
def ranges_tried() -> Iterator[None]:
    """Within, torch.export takes a condition on sizes for settled where all sizes of their ranges agree on it."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    evaluate: Any = ShapeEnv._maybe_evaluate_static

    @functools.wraps(evaluate)  # with `cache_clear`, which torch calls where a range becomes narrower
    def evaluate_or_try(self: Any, expression: Any, **asked: Any) -> Any:
        found = evaluate(self, expression, **asked)
        # Asked when it comes up, and, without axioms, in the end: by then sizes that are one dim are one symbol.
        if found is None and asked.keys() <= {"size_oblivious", "axioms"} and not asked.get("axioms"):
            return settled(self.simplify(expression), self.var_to_range)
        return found

    with mock.patch.object(ShapeEnv, "_maybe_evaluate_static", evaluate_or_try):
        yield
