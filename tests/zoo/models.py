"""Tiny models, each with one of the habits that real models have. Built once per test session (see conftest.py)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """The smallest model with weights: a linear layer and relu."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Pooled(nn.Module):
    """Masked attention over a padded sequence; its result on the real part does not depend on the pad."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.out = nn.Linear(width, width)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask[:, None, :], -1e9)
        x = self.out(scores.softmax(-1) @ x)
        weight = mask[:, :, None].to(x.dtype)
        return x, (x * weight).sum(1) / weight.sum(1)


class Leaky(nn.Module):
    """A mean over the padded dim: what is padded leaks into the result."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention, for ranges of lengths."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Semantics(nn.Module):
    """What people trip on, in one forward: nested inputs, defaults, a buffer and an input that are written to, outputs
    that are inputs, constants, None, views of inputs, and several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.offset = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(
        self, batch: dict[str, Tensor], state: Tensor, scale: float = 2.0, *, flip: bool = False
    ) -> dict[str, object]:
        self.calls.add_(1)
        state.add_(1)
        x = batch["x"] * self.weight * scale + self.table + self.offset
        if flip:
            x = -x
        return {
            "y": x,
            "same": batch["x"],
            "view": batch["x"].view(-1),
            "halves": (x[:, :2].to(torch.bfloat16), x[:, 2:].to(torch.float16)),
            "flags": [batch["flags"].logical_not(), batch["flags"].to(torch.int64).sum()],
            "nothing": None,
            "name": "semantics",
            "number": 7,
            "calls": self.calls.clone(),
        }


class Tied(nn.Module):
    """Two names of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


class Repeated(nn.Module):
    """Enough arithmetic that one call takes milliseconds, for tests of threads."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = torch.tanh(x @ self.weight)
        return x


class Grey(nn.Module):
    """A convolution of one channel, `[n, 1, height, width]` to `[n, 4, height * width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x)).flatten(2)


class Branching(nn.Module):
    """A branch on data: torch.export cannot capture it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


class Joined(nn.Module):
    """An input whose size is the sum of two others'."""

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (torch.cat([x, y], dim=1) * mask).cumsum(1)


class Derived(nn.Module):
    """Inputs whose sizes are derived from one dim."""

    def forward(self, x: Tensor, twice: Tensor) -> Tensor:
        return torch.cat([x, twice], dim=1).cumsum(1)
