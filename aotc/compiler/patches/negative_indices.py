"""[inductor] Operators that refuse negative indices in eager count them from the end.

Inductor decomposes `index_select`, `index_add` and `index_copy` into advanced indexing, which counts negative indices
from the end; eager raises an error for them.
"""

from __future__ import annotations

from collections.abc import Callable
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
    advisory="AOTC-2026-0020",
    operators=("aten.index_select", "aten.index_add", "aten.index_copy", "aten.index_fill"),
    upstream="pytorch#169779",
    targets=(
        "aten.index_select.default(self, dim, index)",
        "aten.index_add.default(self, dim, index, ...)",
        "aten.index_copy.default(self, dim, index, ...)",
        "aten.index_fill.int_Scalar(self, dim, index, ...)",
        "aten.index_fill.int_Tensor(self, dim, index, ...)",
    ),
)


def apply() -> AbstractContextManager[None]:
    """While active, a negative index of these operators is out of bounds, on a CPU."""
    from torch._inductor.decomposition import decompositions

    aten = torch.ops.aten
    refuse = (aten.index_select.default, aten.index_add.default, aten.index_copy.default)
    count = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)  # Inductor decomposes them into index_copy
    changes = {**dict.fromkeys(refuse, _beyond), **dict.fromkeys(count, _from_the_end)}
    return decomposed(
        {
            each: _changed(own, change)
            for each, change in changes.items()
            if (own := decompositions.get(each)) is not None
        }
    )


def _changed(own: Callable[..., Any], change: Callable[[Tensor, Any], Tensor]) -> Callable[..., Any]:
    def compute(x: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.device.type != "cpu":
            return NotImplemented
        size = x.shape[dim] if x.dim() else 1
        return own(x, dim, torch.where(index < 0, change(index, size), index), *args, **kwargs)

    return compute


def _beyond(index: Tensor, size: Any) -> Tensor:
    return torch.full_like(index, torch.iinfo(index.dtype).max)


def _from_the_end(index: Tensor, size: Any) -> Tensor:
    return torch.add(index, size)


def reproduce(patches: Torch) -> None:
    x, index = torch.randn(4, 3), torch.tensor([0, 1])
    compiled = patches.compiled(lambda x, index: x.index_select(0, index) * 2, x, index)
    assert_raises(lambda: compiled(x, torch.tensor([0, -1])))
