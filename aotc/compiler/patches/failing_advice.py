"""[export] The advice on violated constraints ends with an AssertionError.

Expected: `UserError` with the constraint. Seen: `AssertionError: Expected op to be '==', got <= for 25/12 <= rows`,
from `DimConstraints.prettify_results`: it expects bounds that are integers, and 24 elements a row give another.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_raises

PATCH = Patch(
    __name__,
    severity="build",
    stage="export",
    targets=("torch.fx.experimental.symbolic_shapes:DimConstraints.prettify_results(original_signature, ...)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, torch.export reports the conditions that a range violates even if it cannot suggest a fix."""
    from torch.fx.experimental.symbolic_shapes import DimConstraints

    advise = DimConstraints.prettify_results

    def advice(*args: Any, **kwargs: Any) -> str:
        with suppress(AssertionError):
            return advise(*args, **kwargs)
        return ""

    return replaced(DimConstraints, "prettify_results", advice)


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        return x[:1] if x.numel() >= 50 else x

    shapes = [{0: torch.export.Dim("rows", min=2, max=100)}]
    assert_raises(lambda: patches.exported(function, [torch.zeros(8, 24)], shapes), torch._dynamo.exc.UserError)
