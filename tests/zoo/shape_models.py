"""Tiny models for the tests of shapes and semantics (tests/shapes)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch.nn import functional as F


class KeyValueCache(nn.Module):
    """A buffer that is written at a position, given as a 0-d tensor, and a counter of the calls."""

    def __init__(self, length: int = 16, width: int = 4) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.register_buffer("keys", torch.zeros(length, width), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.keys.index_copy_(0, position.reshape(1), self.project(x))
        self.steps.add_(1)
        seen = torch.arange(self.keys.shape[0]) <= position
        return (self.keys * seen[:, None]).sum(0), position + 1, self.keys


class History(nn.Module):
    """Keeps old values of buffers and inputs in others, before it writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("current", torch.zeros(4))
        self.register_buffer("previous", torch.zeros(4))
        self.register_buffer("tail", torch.zeros(2))

    def forward(self, x: Tensor, old: Tensor, kept: Tensor) -> Tensor:
        self.tail.copy_(self.current[1:3])
        self.previous.copy_(self.current)
        self.current.copy_(x)
        swapped = kept.clone()
        kept.copy_(old)
        old.copy_(swapped)
        return self.current - self.previous


class Assigned(nn.Module):
    """Assigns to its buffers, and gives back what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.arange(4.0))
        self.register_buffer("previous", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        old = self.hidden
        self.hidden = old * 0.5 + x
        self.previous = old.view(2, 2).view(4)
        return self.hidden + self.previous, old, old[1:]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).relu()


class Pooling(nn.Module):
    """Windows as wide as the images ask for; 4 divides the height that is tuned at."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        flat, solid = (F.adaptive_max_pool2d(x, size, return_indices=True) for size in (3, 4)), x.unsqueeze(0)
        return (
            F.adaptive_avg_pool2d(x, 3),
            F.adaptive_avg_pool2d(x, (1, 4)),
            *(tensor for pair in flat for tensor in pair),
            F.adaptive_avg_pool3d(solid, 2),
            *F.adaptive_max_pool3d(solid, (2, 4, 3), return_indices=True),
            F.adaptive_max_pool2d(x, 1),
        )


class Looping(nn.Module):
    """Loops of any number of iterations, also none: from a value that nothing else needs, and from a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.ones(4, 4))

    def forward(self, x: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def more(count: Tensor, _: Tensor) -> Tensor:
            return count < times

        def double(count: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, value * 2

        none = torch.zeros((), dtype=torch.int64)
        _, first = while_loop(more, double, (none, x * 2))
        _, second = while_loop(more, double, (none, self.step.clone()))
        return first, (x.sin() @ self.step).cos(), second


class Noisy(nn.Module):
    """Random operators: noise in the forward, and dropout, which eval mode turns off."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + torch.rand_like(x), F.dropout(x, 0.5, self.training) * 2, torch.rand(1000)


class Accumulating(nn.Module):
    """Writes to an input, and gives an input and a view of one back."""

    def forward(self, total: Tensor, x: Tensor) -> dict[str, Tensor]:
        total.add_(x)
        return {"doubled": total * 2, "total": total, "first": x[:, :1]}


class Bag(nn.Module):
    """A sum of embeddings, which an operator of torch's makes, and checks indices for, and of one that is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.embedding = nn.EmbeddingBag(8, 4, mode="sum"), nn.Embedding(8, 4)

    def forward(self, bags: Tensor, ids: Tensor) -> Tensor:
        return self.bag(bags) + self.embedding(ids)


class Mixed(nn.Module):
    """Several dtypes, and a condition over two dims together that only its code says."""

    def forward(self, signal: Tensor, half: Tensor, brain: Tensor, flags: Tensor, ids: Tensor) -> dict[str, Tensor]:
        joined = torch.cat([half, brain.to(half.dtype)])
        if joined.shape[0] > 40:
            joined = -joined
        return {
            "joined": joined,
            "signal": signal * (1 + 2j) + signal.conj(),
            "half": half * 2,
            "brain": brain.cumsum(0),
            "flags": flags ^ (ids > 3),
            "ids": ids * ids,
        }


class Recurrent(nn.Module):
    """Layers of every kind, over a length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.GRU(6, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.third = nn.LSTM(16, 8, proj_size=4, bias=False)
        self.fourth = nn.RNN(4, 6, nonlinearity="relu")
        self.fifth = nn.RNN(6, 5)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        x, _ = self.first(x, state)
        x, (hidden, cell) = self.second(x)
        x, _ = self.third(x.transpose(0, 1))
        x, last = self.fifth(self.fourth(x)[0])
        return x, last, (hidden, cell)


class Generated(nn.Module):
    """Operators of torch that a library calls, unless code is generated for them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LSTM(6, 8, batch_first=True)
        self.second = nn.GRU(8, 8)

    def forward(self, x: Tensor, to: Tensor) -> tuple[Tensor, ...]:
        y, _ = self.first(x)
        y, _ = self.second(y)
        best = y.topk(2, dim=-1).values  # which of equal elements they are, eager does not promise
        pooled = F.adaptive_avg_pool2d(torch.cat([y] * 5, -1).repeat(1, 8, 1), (3, 7))
        order, descending = torch.sort(y, stable=True, dim=1), y.sort(-1, descending=True)
        added = torch.zeros(x.shape[0], 9).scatter_add(1, to, x.sum(-1))
        return y.cumsum(1), to.cumsum(-1), best, pooled, *order, descending.values, added


class Classifier(nn.Module):
    """A convolution and a product with weights, which oneDNN packs where they are frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu(self.convolution(x)).flatten(2)).softmax(-1)
