"""`repeat_interleave` with `output_size`: counts that are negative, or do not add up to the size, are an error.

Inductor computes the rows' indices by a search that accepts any counts, and ATen's kernel writes beyond its result
before it refuses negative ones. Here wrong counts give indices that are out of bounds, which the gather refuses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.shared.decompositions import decomposed


def counts_of_rows_are_checked() -> AbstractContextManager[None]:
    return decomposed({torch.ops.aten.repeat_interleave.Tensor: _indices})


def _indices(counts: Tensor, output_size: Any = None) -> Any:
    if output_size is None or counts.device.type != "cpu" or counts.shape[0] == 0:
        return NotImplemented
    ends = counts.cumsum(0)
    right = (ends[-1] == output_size) & (counts >= 0).all()
    positions = torch.arange(output_size)
    found = torch.searchsorted(ends, positions, out_int32=counts.dtype == torch.int32, right=True)
    return torch.where(right, found, torch.full_like(found, torch.iinfo(found.dtype).max))
