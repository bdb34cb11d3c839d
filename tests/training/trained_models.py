"""Models of training.yaml: each small, with what a training step has to get right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mixed(nn.Module):
    """Tied, frozen and unused parameters, batch norm, values without a gradient, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.tied = nn.Linear(8, 16)
        self.tied.weight = self.enter.weight
        self.leave = nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            scale = self.leave(self.tied(x)).std()
        hidden = F.gelu(self.norm(self.enter(x) + self.tied(x)))
        hidden = torch.relu(self.frozen(hidden)) + hidden.detach()
        out = self.leave(hidden)
        return {"out": out / scale, "hidden": hidden, "top": out.argmax(-1), "loss": F.mse_loss(out, y)}


class Random(nn.Module):
    """Dropout, whose mask the backward needs again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 64, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(self.enter(x))).sum(-1)


def mixed() -> nn.Module:
    return Mixed()


def random() -> nn.Module:
    return Random()
