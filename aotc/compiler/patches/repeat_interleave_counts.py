"""[inductor] `repeat_interleave` with an `output_size` takes counts that do not add up to it.

Expected: an error. Seen: rows beyond the last one are repeated; and ATen's kernel writes beyond its result before it
refuses negative counts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_raises
from aotc.compiler.patches.shared.inductor import decomposed

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0006",
    complete=True,
    operators=("aten.repeat_interleave",),
    targets=("aten.repeat_interleave.Tensor(repeats)",),
)


def apply() -> AbstractContextManager[None]:
    """While active, wrong counts give indices that are out of bounds, which the gather refuses."""
    return decomposed({torch.ops.aten.repeat_interleave.Tensor: _indices})


def _indices(counts: Tensor, output_size: Any = None) -> Any:
    if output_size is None or counts.device.type != "cpu" or counts.shape[0] == 0:
        return NotImplemented
    ends = counts.cumsum(0)
    right = (ends[-1] == output_size) & (counts >= 0).all()
    positions = torch.arange(output_size)
    found = torch.searchsorted(ends, positions, out_int32=counts.dtype == torch.int32, right=True)
    return torch.where(right, found, torch.full_like(found, torch.iinfo(found.dtype).max))


def reproduce(patches: Torch) -> None:
    x, counts = torch.randn(3, 2), torch.tensor([1, 2, 3])
    compiled = patches.compiled(lambda x, counts: x.repeat_interleave(counts, 0, output_size=6) * 2, x, counts)
    assert_raises(lambda: compiled(x, torch.tensor([1, 2, 2])))
