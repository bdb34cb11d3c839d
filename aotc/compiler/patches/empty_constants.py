"""[AOTInductor] Constants after one without elements are read from other places.

Expected: the model's. Seen: with `freezing`, the size of an empty view counts as its storage's in `data_size` of
`codegen/cpp_wrapper_cpu.py`, and as nothing in `_to_bytes` of `codecache.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0010",
    only=("frozen",),
    targets=("torch._inductor.graph:GraphLowering.allocate_non_dup_const_name(name, data)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, a constant without elements has its own storage, and is not a view of another."""
    from torch._inductor.graph import GraphLowering

    name_constant = GraphLowering.allocate_non_dup_const_name

    def name_own(graph: Any, name: str | None, data: Tensor) -> str:
        if data.layout is torch.strided and not data.numel():
            data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=data.device)
        return str(name_constant(graph, name, data))

    with replaced(GraphLowering, "allocate_non_dup_const_name", name_own):
        yield


def reproduce(patches: Torch) -> None:
    weights = torch.arange(5.0).view(5, 1) + 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Buffer(weights)

        def forward(self, x: Tensor) -> Any:
            return x * 2, self.weights.sum() * 2, self.weights[:, 1:], self.weights * 3, self.weights * 4

    model = Model()
    compiled = patches.library(model, torch.ones(8), freezing=True)
    torch.testing.assert_close(
        compiled(torch.ones(8))[1:], [weights.sum() * 2, weights[:, 1:], weights * 3, weights * 4]
    )
