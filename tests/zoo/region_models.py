"""Models for regions: blocks that repeat, and around them what no export captures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A residual block that knows its own index, and does not use it; and what it does, by a private attribute."""

    def __init__(self, width: int, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self._active = ["plus"]
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = torch.tanh(self.linear(x)) * scale
        return x + y if "plus" in self._active else x - y


class Gated(nn.Module):
    """A block of another kind: it writes to a buffer of its own and returns two tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        gate = torch.sigmoid(self.gate(x))
        return x * gate, gate


class Stack(nn.Module):
    """Two kinds of blocks, and between them a branch on data and a print."""

    def __init__(self, blocks: int = 3, gates: int = 2, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, index) for index in range(blocks))
        self.gates = nn.ModuleList(Gated(width) for _ in range(gates))
        self.seen = 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.seen += 1
        for block in self.blocks:
            x = block(x)
            if x.abs().max().item() > 1e6:
                print("exploding")
                break
        gates = []
        for gate in self.gates:
            x, opened = gate(x)
            gates.append(opened)
        return {"x": x, "gates": gates}


class Pooled(nn.Module):
    """Layers over a padded sequence, with a branch on data between them; it gives the sequence, and its mean by row."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, index) for index in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
            if x.abs().max().item() > 1e6:
                break
        kept = mask[..., None]
        mean = (x * kept).sum(1) / kept.sum(1).clamp(min=1)
        return {"x": x, "parts": (mean, x.shape[-1])}


class Act(nn.Module):
    """A block whose activation is a plain function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class Acts(nn.Module):
    """Blocks that differ in nothing but a function."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Act(function) for function in (F.relu, F.gelu, F.relu))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Caching(nn.Module):
    """A block that is given an object."""

    class Cache:
        pass

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, Caching.Cache())
        return x


class Probe(nn.Module):
    """Calls its parts in ways that are hard to describe, by `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.parts = nn.ModuleList(Inner() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = getattr(self, self.how)(part, x)
        return x

    def plain(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(x)

    def flat(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(x.reshape(-1, 4)).view_as(x)

    def doubled(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(torch.cat([x, x], 1), mask=x[:, 0])[:, : x.shape[1]]

    def transposed(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(x.transpose(0, 1)).transpose(0, 1)

    def counting(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(x, scale=x.shape[1])

    def twice(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(part(x[:, :1]) + x)

    def nested(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(x, extra={"pair": (x, None)})

    def failing(self, part: nn.Module, x: Tensor) -> Tensor:
        if x.shape[1] > 4:
            raise ValueError("too long")
        return part(x)


class Masking(nn.Module):
    """Gives its parts None in the place of a mask that masks nothing, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Inner() for _ in range(2))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        mask = None if attention_mask.all() else attention_mask[:, -1:].expand(-1, 4).to(x.dtype)
        for part in self.parts:
            x = part(x, mask=mask)
        return x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None, extra: dict[str, Any] | None = None
    ) -> Tensor:
        x = self.linear(x) * scale
        if mask is not None:
            x = x + mask[:, None]
        if extra is not None:
            x = x + extra["pair"][0]
        return x


class Deep(nn.Module):
    """Blocks with a branch on data inside, around parts that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Block(4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return self.body(x)
