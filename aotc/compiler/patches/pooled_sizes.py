"""[export] A pooled size of a range asks for a remainder.

Expected: `F.max_pool2d(x, 3, 2)` exports for every height of a range. Seen: "Constraints violated", as `div_rtn` of
`torch/_meta_registrations.py` corrects a quotient, as C++ needs it, that Python has floored already. The correction
checks a remainder, which only some sizes of the range have. Mended in a newer torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="build",
    torch=">=2.11,<2.13",
    stage="export",
    targets=("torch._meta_registrations:div_rtn(x, y)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, the pooled size of a range is one expression for the whole range: the floored quotient."""

    def div_rtn(x: Any, y: Any) -> Any:
        return x // y

    return replaced(torch._meta_registrations, "div_rtn", div_rtn)


def reproduce(patches: Torch) -> None:
    shapes = [{2: torch.export.Dim("height", min=8, max=64)}]
    exported = patches.exported(lambda x: F.max_pool2d(x, 3, 2), [torch.randn(1, 1, 9, 8)], shapes)
    for height in (8, 63, 64):
        x = torch.randn(1, 1, height, 8)
        assert torch.equal(exported.module()(x), F.max_pool2d(x, 3, 2))
