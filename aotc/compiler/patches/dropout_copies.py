"""[export] Dropout that drops nothing returns a copy.

Expected: as in eager, `F.dropout(x, 0.5, False)` is `x`, so what is written to the result is in `x`. Seen: the
decomposed operator copies, and the write is lost.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0009",
    operators=("aten.dropout", "aten.clone"),
    torch=">=2.11,<2.14",
    stage="export",
    targets=("torch:_VF.dropout",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, dropout that drops nothing returns its input itself."""
    dropout = torch._VF.dropout

    def dropped(x: Tensor, p: float, train: bool) -> Tensor:
        return dropout(x, p, train) if train and p > 0 else x

    return replaced(torch._VF, "dropout", dropped)


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        F.dropout(x, 0.5, False).add_(1)
        return x * 2

    assert_same(patches.compiled, function, torch.ones(4))
