"""A Llama with a key-value cache, of which each rank has some of the heads and a part of each MLP.

Collectives are functional (`torch.distributed._functional_collectives`): torch.export captures those.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Llama(nn.Module):
    """`heads` and `intermediate` are those of the whole model; the ranks of `group` share them evenly."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, intermediate: int, length: int, group: ProcessGroup
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, intermediate, length, group) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Logits of the last of `tokens`, which stand at `start` and behind.

        Args:
            tokens: int64 `[1, seq]`.
            start: int64 `[]`, the number of tokens that the cache holds already.

        Returns:
            `[1, vocabulary]`.
        """
        positions = start + torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x[:, -1]))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, intermediate: int, length: int, group: ProcessGroup) -> None:
        super().__init__()
        ranks = group.size()
        self.group = group
        self.heads, self.size = heads // ranks, width // heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width // ranks, bias=False)
        self.out = nn.Linear(width // ranks, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * intermediate // ranks, bias=False)
        self.down = nn.Linear(intermediate // ranks, width, bias=False)
        self.register_buffer("keys", torch.zeros(1, self.heads, length, self.size), persistent=False)
        self.register_buffer("values", torch.zeros(1, self.heads, length, self.size), persistent=False)
        frequencies = 10000.0 ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.outer(torch.arange(length), frequencies)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self._sum(self.out(self._attention(self.before_attention(x), positions)))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self._sum(self.down(F.silu(gate) * up))

    def _attention(self, x: Tensor, positions: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        query, key, value = (
            part.view(batch, seq, self.heads, self.size).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        angles = self.angles[positions]
        query, key = rotated(query, angles), rotated(key, angles)
        self.keys.index_copy_(2, positions, key)
        self.values.index_copy_(2, positions, value)
        seen = torch.arange(self.keys.shape[2], device=x.device) <= positions[:, None]
        mixed = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen)
        return mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.size)

    def _sum(self, x: Tensor) -> Tensor:
        """Over all ranks, each of which has a part of the products."""
        return x if self.group.size() == 1 else collectives.all_reduce(x, "sum", self.group)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class OneRank:
    """Stands for a process group where the model is whole."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


SPLIT = {"qkv": 3, "gate_up": 2}
"""Layers whose outputs are split between the ranks, with the number of equal parts that each rank has a piece of."""


def llama(
    vocabulary: int = 512,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    intermediate: int = 128,
    length: int = 64,
    group: ProcessGroup | None = None,
) -> Llama:
    """This rank's part of a Llama with random weights; the whole model without a group.

    A manifest's factory gets `group` from aotc: while a build captures the model, it is one of fake ranks.
    """
    group = group or OneRank()  # type: ignore[assignment]
    model = Llama(vocabulary, width, layers, heads, intermediate, length, group)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            with torch.no_grad():
                parameter.copy_(piece(name, whole_weight(name, parameter, group.size()), group.rank(), group.size()))
    return model


def whole_weight(name: str, part: Tensor, ranks: int) -> Tensor:
    """The weight of the whole model: the same random numbers on every rank."""
    layer = name.split(".")[-2]
    rows, columns = part.shape
    rows, columns = rows * (ranks if layer in SPLIT else 1), columns * (ranks if layer in ("out", "down") else 1)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(rows, columns, generator=generator) * 0.5 / columns**0.5


def piece(name: str, weight: Tensor, rank: int, ranks: int) -> Tensor:
    """The part of a weight of the whole model that a rank has."""
    layer = name.split(".")[-2]
    if layer in SPLIT:
        return torch.cat([part.chunk(ranks)[rank] for part in weight.chunk(SPLIT[layer])])
    if layer in ("out", "down"):
        return weight.chunk(ranks, dim=1)[rank]
    return weight
