"""Modules that the tests compile, in a file of their own, so that a build can import them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

import aotc


class Net(nn.Module):
    def __init__(self, width: int = 8, words: int = 50) -> None:
        super().__init__()
        self.width, self.words = width, words
        self.embed = nn.Embedding(words, width)
        self.register_buffer("scale", torch.randn(width))
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor, double: bool = False) -> Tensor:
        y: Tensor = self.head(self.embed(ids).sum(1) * self.scale)
        return y * 2 if double else y


class Secret(nn.Module):
    """How it is made cannot be read from its attributes."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x[:, : layer.in_features]).sum() for layer in self.layers)  # type: ignore[return-value]


def secret() -> Secret:
    return Secret([2, 3])


def broken() -> Secret:
    raise RuntimeError("no weights here")


def another() -> Net:
    return Net(width=16)


def frozen() -> Net:
    net = Net()
    net.embed.requires_grad_(False)
    return net


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.linear(x).relu()
        return y


class Branches(nn.Module):
    """A value in a tensor decides, so it cannot be captured whole."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.width, self.layers = width, layers
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = x if x.sum() > 0 else -x
        return x * 2 if twice else x


class Coder(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width)

    def encode(self, x: Tensor, factor: float = 1.0) -> Tensor:
        y: Tensor = self.linear(x).relu() * factor
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).tanh()


class Decorated(nn.Module):
    def __init__(self, factor: int = 3) -> None:
        super().__init__()
        self.factor = factor

    @aotc.compile(build="exit")
    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Numbering(nn.Module):
    """Reads an iterator, whose items a graph cannot have."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return x + next(self.numbers)


class Counting(nn.Module):
    """Its calls change an attribute that they read, and make another one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width, self.calls = width, 0
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.longest = max(vars(self).get("longest", 0), len(x))
        y: Tensor = self.linear(x)
        return y


class Scaled(nn.Module):
    """Its factor is an argument of its constructor, and may be changed later."""

    def __init__(self, width: int = 8, factor: float = 1.0) -> None:
        super().__init__()
        self.width, self.factor = width, factor
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh() * self.factor
        return y


class Counted(Scaled):
    def __init__(self, width: int = 8, factor: float = 1.0) -> None:
        super().__init__(width, factor)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.turned = nn.Parameter(torch.ones(4, 2))
        self.register_buffer("window", torch.ones(3, 4)[:, :2])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x).mean((2, 3)) @ self.turned
        return y + self.window.sum(0)
