"""[inductor] `any` and `all` of uint8 are bools.

Expected: uint8, as in eager. Seen: bools, so that a library's caller reads another dtype than the graph says.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.inductor import decomposed

_OPERATORS = tuple(f"aten.{name}.{overload}" for name in ("any", "all") for overload in ("default", "dim", "dims"))

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0047",
    operators=("aten.any", "aten.all"),
    dtypes=("uint8",),
    targets=tuple(f"{name}(self, ...)" for name in _OPERATORS),
)


def apply() -> AbstractContextManager[None]:
    """While active, these are computed of bools, and cast."""
    operators = [torch.ops.aten.any, torch.ops.aten.all]
    return decomposed(
        {
            overload: _of_bytes(overload)
            for operator in operators
            for overload in (operator.default, operator.dim, operator.dims)
        }
    )


def _of_bytes(operator: Any) -> Callable[..., Any]:
    def compute(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype != torch.uint8:
            return NotImplemented
        return operator(x != 0, *args, **kwargs).to(torch.uint8)

    return compute


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.any(), x.all(), x.any(0), x.all(0), x.any((0, 1)), x.all(1, keepdim=True)

    assert_same(patches.compiled, function, torch.tensor([[0, 2, 3], [0, 0, 5]], dtype=torch.uint8))
