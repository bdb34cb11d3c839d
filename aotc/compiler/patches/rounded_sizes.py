"""[export] `round(size, -1)` of a symbolic size is the size.

Expected: 30 for 34. Seen: 34; `SymInt.__round__` ignores negative digits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0030",
    only=("range",),
    stage="export",
    targets=("torch:SymInt.__round__(ndigits)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, `round(size, -1)` is a multiple of 10; torch returns the size itself."""

    def rounded(self: Any, ndigits: int | None = None) -> Any:
        return self if ndigits is None or ndigits >= 0 else _to_multiple(self, 10**-ndigits)

    return replaced(torch.SymInt, "__round__", rounded)


def _to_multiple(number: Any, of: int) -> Any:
    """The nearest multiple, ties to even, as in `round`; by operations that torch supports for sizes."""
    nearest = (2 * number + of) // (2 * of)  # ties go up
    from_odd = (2 * number + 3 * of) % (4 * of)  # 0 for a tie that went up to an odd multiple
    return (nearest - 1 + (from_odd + 4 * of - 1) // (4 * of)) * of


def reproduce(patches: Torch) -> None:
    shapes = [{0: torch.export.Dim("rows", min=2, max=100)}]
    exported = patches.exported(lambda x: x[:1] + round(x.shape[0], -1), [torch.zeros(17)], shapes)
    assert exported.module()(torch.zeros(34)).item() == round(34, -1)
