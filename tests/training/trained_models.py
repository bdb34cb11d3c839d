"""Models of training.yaml: each small, with what a training step has to get right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mixed(nn.Module):
    """Tied, frozen and unused parameters, one that gradients do not reach, batch norms, of which one stays in eval
    mode, values without a gradient, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.still = nn.BatchNorm1d(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.tied = nn.Linear(8, 16)
        self.tied.weight = self.enter.weight
        self.leave = nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.rand(16))

    def train(self, mode: bool = True) -> Mixed:
        super().train(mode)
        self.still.eval()
        return self

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            scale = self.leave(self.tied(x) * self.scale).std()
        hidden = F.gelu(self.still(self.norm(self.enter(x) + self.tied(x))))
        hidden = torch.relu(self.frozen(hidden)) + hidden.detach()
        out = self.leave(hidden)
        loss = F.mse_loss(out, y)
        return {"out": out / scale, "hidden": hidden, "top": out.argmax(-1), "loss": loss, "turned": out.t()}


class Padded(nn.Module):
    """A loss that leaves out rows of padding, by their labels; `enter` has no finite gradient at a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16, bias=False)
        self.leave = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.enter(x)
        out = self.leave(hidden / hidden.norm(dim=-1, keepdim=True))
        return {"out": out, "loss": F.cross_entropy(out, y, reduction="sum")}


def padded() -> nn.Module:
    return Padded()


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


class Block(nn.Module):
    """An adapter of low rank beside a frozen layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + F.silu(self.base(normed) + self.up(self.down(normed)))


class Stack(nn.Module):
    """Equal blocks, of which the last one alone trains its norm, between layers that stay eager."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        for block in self.blocks[:-1]:
            block.norm.requires_grad_(False)
        self.head = nn.Linear(16, 10)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def stack() -> nn.Module:
    return Stack()


class Clip(torch.autograd.Function):
    """The identity, whose gradient is clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.1, 0.1)


class Heads(nn.Module):
    """A recurrent layer, a gradient that is clipped, and two losses that share them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 6, batch_first=True)
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = Clip.apply(self.layer(x)[0][:, -1])
        return {
            "left": F.mse_loss(self.left(hidden), y),
            "right": F.cross_entropy(self.right(hidden), y),
            "hidden": hidden,
        }


def heads() -> nn.Module:
    torch.manual_seed(0)
    return Heads()
