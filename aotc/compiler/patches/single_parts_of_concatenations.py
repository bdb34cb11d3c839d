"""[inductor] A concatenation of one part beside empty ones lies as that part does.

Expected: contiguous, as eager lays it, so that a `view` holds. Seen: "Cannot view a tensor …" in the lowering. A cache
that is still empty is such a part.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.inductor import decomposed

PATCH = Patch(
    __name__,
    severity="build",
    targets=("aten.cat.default(tensors)",),
)


def apply() -> AbstractContextManager[None]:
    """While active, a concatenation with one part that is not empty has eager's strides."""
    return decomposed({torch.ops.aten.cat.default: _single_part})


def _single_part(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    parts = [part for part in tensors if not _is_known_as_empty(part, dim)]
    if len(parts) != 1:
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    formats = {suggest_memory_format(tensor) for tensor in tensors}  # ATen's compute_output_memory_format
    layout = formats.pop() if len(formats) == 1 else torch.contiguous_format
    return parts[0].to(dtype).clone(memory_format=layout)


def _is_known_as_empty(part: Tensor, dim: int) -> bool:
    """The check of Inductor's own decomposition, whose rule is that of `torch.cat`."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    axis = 0 if part.dim() == 1 else dim
    return part.dim() > 0 and guard_or_false(part.shape[axis] == 0)


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        return torch.cat([y, y[..., :0]], -1).view(-1, 5, 8) + 1

    assert_same(patches.compiled, function, torch.randn(2, 5, 4, 8))
