"""[export] `size // 0.1` of a symbolic size rounds the quotient first.

Expected: 29 for 3, as in Python. Seen: 30, which is `floor(3 / 0.1)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch
from aotc.errors import BuildError

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0011",
    operators=("math.floor", "operator.floordiv"),
    only=("range",),
    stage="export",
    targets=(
        "torch:SymInt.__floordiv__(other)",
        "torch:SymFloat.__floordiv__(other)",
    ),
)

_EXACT = 1 << 20
"""With a divisor of at most this numerator and denominator, no quotient of a size is rounded up to an integer."""


@contextmanager
def apply() -> Iterator[None]:
    """While active, `//` of a size by a number like 0.1 raises BuildError."""
    floor = {kind: kind.__floordiv__ for kind in (torch.SymInt, torch.SymFloat)}

    def divided(self: Any, other: Any) -> Any:
        if isinstance(other, float) and max(map(abs, other.as_integer_ratio())) > _EXACT:
            raise BuildError(
                f"a size of a range is divided by {other} with `//`, which is exact only for Python's numbers",
                hint="divide by an integer, or use `math.floor(size / number)`, which rounds the quotient first",
            )
        return floor[type(self)](self, other)

    with (
        replaced(torch.SymInt, "__floordiv__", divided),
        replaced(torch.SymFloat, "__floordiv__", divided),
    ):
        yield


def reproduce(patches: Torch) -> None:
    shapes = [{0: torch.export.Dim("rows", min=2, max=100)}]
    try:
        exported = patches.exported(lambda x: x[:1] + x.shape[0] // 0.1, [torch.zeros(17)], shapes)
    except BuildError:
        return  # refused, which is not a wrong result
    assert exported.module()(torch.zeros(3)).item() == 3 // 0.1
