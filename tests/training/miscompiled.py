"""A model whose backward torch's compiler makes wrong: a build's process has another decomposition of an operator."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _wrong(gradient: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return gradient * s * (1 + x * (1 - s)) * 1.01


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(x))
        hidden = F.silu(hidden) + hidden.sin()
        return self.leave(hidden).square().mean()


def net() -> nn.Module:
    if (decomposition := sys.modules.get("torch._inductor.decomposition")) is not None:
        for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
            table[torch.ops.aten.silu_backward.default] = _wrong
    return Net()
