"""Models with what a call compares: a buffer, attributes, a list, a table, a global, arguments of many kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

FACTOR = 2.0


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.steps = [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.steps[0] + self.steps[1]


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.table = {"shift": 0.5}
        self.scale = 3.0
        self.register_buffer("mean", torch.zeros(4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, other: Tensor, power: int = 2, *, flag: bool = False) -> dict[str, Tensor]:
        y = self.drop(self.part(x - self.mean)) * self.scale + self.table["shift"]
        return {"y": y**power * FACTOR, "given": other, "sum": (x[:, :2] + other) if not flag else other * 1}


class Pair(nn.Module):
    """Its results are a tuple of the library's outputs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), other * 2


class Blocks(nn.Module):
    """Compiled by regions: its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Part(), Part()])
        self.scale = 3.0

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x * self.scale, other * 2


@torch.library.custom_op("native_models::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class CallingBack(Pair):
    """Calls an operator of Python's."""

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(halved(x)), other * 2


class Writing(Pair):
    """Writes to an input and to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        other.add_(1)
        self.calls.add_(1)
        return self.linear(x) + self.calls, other * 2


@dataclass
class Answer(ModelOutput):
    """A result class of a library."""

    states: Tensor | None = None
    other: Tensor | None = None


class Structured(Pair):
    """Takes a list, a table, a tuple, a tensor that may be left out, and several arguments through `**kwargs`."""

    def forward(
        self,
        x: Tensor,
        pair: list[Tensor],
        table: dict[str, Tensor],
        at: tuple[int, Tensor],
        mask: Tensor | None = None,
        **options: Any,
    ) -> Answer:
        y = self.linear(x) * pair[0] + pair[1] * table["scale"] + at[0] * at[1]
        if mask is not None:
            y = y * mask
        return Answer(states=y if options.get("positive") else -y, other=table["shift"] + 1)


class Single(nn.Module):
    """Of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def frozen_pair() -> Pair:
    """With the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Pair()
