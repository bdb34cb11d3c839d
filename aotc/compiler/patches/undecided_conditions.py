"""[export] A condition that holds for every size of a range is refused.

Expected: the branch is taken, since `n * (8 + n - n % 8) > 1` for all n from 2 to 100. Seen: "Not all values … satisfy
the generated guard".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.capture.ranges.range_solver import settled
from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="build",
    stage="export again",
    targets=("torch.fx.experimental.symbolic_shapes:ShapeEnv._maybe_evaluate_static(expr)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, torch.export decides a condition on sizes that has one value for all sizes of their ranges: what it
    can neither prove nor solve is decided by trying each size.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    evaluate: Any = ShapeEnv._maybe_evaluate_static

    @functools.wraps(evaluate)  # with `cache_clear`, which torch calls when a range is narrowed
    def evaluate_or_try(self: Any, expr: Any, *args: Any, **asked: Any) -> Any:
        found = evaluate(self, expr, *args, **asked)
        # Called when the condition comes up, and, without axioms, at the end, when equal sizes have one symbol.
        if found is None and not args and asked.keys() <= {"size_oblivious", "axioms"} and not asked.get("axioms"):
            return settled(self.simplify(expr), self.var_to_range)
        return found

    with replaced(ShapeEnv, "_maybe_evaluate_static", evaluate_or_try):
        yield


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        size = x.shape[0]
        return x + 1 if size * (8 + size - size % 8) > 1 else x - 1

    shapes = [{0: torch.export.Dim("rows", min=2, max=100)}]
    patches.exported(function, [torch.zeros(17)], shapes, again=True)
