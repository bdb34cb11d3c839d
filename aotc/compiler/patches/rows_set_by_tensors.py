"""[export] `x[i] = row` with an integer tensor `i` of no axes asks for its value.

Expected: an `index_put`, as `x[i[None]] = row` gives. Seen: `GuardOnDataDependentSymNode`. Mended in a newer torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="build",
    torch=">=2.11,<2.14",
    stage="export",
    targets=("torch:Tensor.__setitem__(key, value)",),
)

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def apply() -> AbstractContextManager[Any]:
    """While active, `x[i] = row` treats an integer tensor without axes as one of one axis."""
    assign = Tensor.__setitem__

    def assigned(x: Tensor, index: Any, value: Any) -> None:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, Tensor) and first.dim() == 0 and first.dtype in _INTEGERS:
            index = (first[None], *rest)
        assign(x, index, value)

    return replaced(Tensor, "__setitem__", assigned)


def reproduce(patches: Torch) -> None:
    def function(x: Tensor, at: Tensor, row: Tensor) -> Tensor:
        x = x.clone()
        x[at] = row
        return x

    inputs = torch.zeros(4, 3), torch.tensor(2), torch.ones(3)
    assert torch.equal(patches.exported(function, inputs).module()(*inputs), function(*inputs))
