"""The models that the manifests in `manifests/` compile: plain `torch.nn` code, with nothing in it that knows of aotc.

Each model has a factory, a function that a manifest names as `examples.models:<name>`. A factory takes plain values
(the manifest's `kwargs`) and returns the module; checkpoints are loaded later, by the service.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# -- yardsticks: the three models that articles on torch.compile measure ----------------------------------------------


class TinyBlock(nn.Module):
    """A feed-forward block with a residual: `[batch, seq, hidden]` to the same shape."""

    def __init__(self, hidden: int, expansion: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, expansion * hidden)
        self.down = nn.Linear(expansion * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(x)))
        y = y * math.sqrt(2.0) + 0.01
        return x + self.down(y)


class PointwiseHeavy(nn.Module):
    """Many cheap operations on each element, which eager runs one by one: `[rows, dim]` to the same shape."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.bias
        x = self.round(x)
        x = x / (1.0 + x.abs())
        x = self.round(x)
        x = x / (1.0 + x.abs())
        return self.round(x)

    def round(self, x: Tensor) -> Tensor:
        x = torch.sin(x) + torch.cos(x) * torch.tanh(x)
        return x * torch.sigmoid(x) + F.relu(x)


class MatmulHeavy(nn.Module):
    """Square linear layers with a relu after each: `[rows, dim]` to the same shape."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


# -- transformers -----------------------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """Multi-head self-attention: `[batch, seq, width]` to the same shape."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} cannot be divided among {heads} heads")
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        # [batch, seq, 3 * width] -> three of [batch, heads, seq, width / heads]
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, width))


class TransformerBlock(nn.Module):
    """A pre-norm block, attention and then a feed-forward part: `[batch, seq, width]` to the same shape."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal=causal)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """A decoder: token ids, int64 `[batch, seq]`, to logits `[batch, seq, vocabulary]`."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(position)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class EarlyExitGPT(GPT):
    """A GPT with branches on data between its blocks, which no export captures: a gate looks at the hidden state every
    other block and ends early where it has settled. Token ids, int64 `[batch, seq]`, to logits of the last token, float
    `[batch, vocabulary]`, and how many blocks ran."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, positions: int, settled: float) -> None:
        super().__init__(layers, width, heads, vocabulary, positions)
        self.settled = settled

    def forward(self, input_ids: Tensor) -> tuple[Tensor, int]:
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(position)
        ran = 0
        for block in self.blocks:
            before = x
            x = block(x)
            ran += 1
            if ran % 2 == 0 and (x - before).abs().mean() < self.settled:
                break
        return self.head(self.norm(x[:, -1])), ran


# -- factories --------------------------------------------------------------------------------------------------------


def tiny_block(hidden: int = 768, expansion: int = 4) -> TinyBlock:
    """A feed-forward block of `hidden` features, `expansion` times as many inside."""
    return TinyBlock(hidden, expansion)


def pointwise_heavy(dim: int = 4096) -> PointwiseHeavy:
    """Rounds of cheap operations on `dim` features: what fusion is good for."""
    return PointwiseHeavy(dim)


def matmul_heavy(dim: int = 4096, layers: int = 4) -> MatmulHeavy:
    """`layers` linear layers of `dim` features: what autotuning is good for."""
    return MatmulHeavy(dim, layers)


def transformer_block(width: int = 256, heads: int = 4) -> TransformerBlock:
    """One block of an encoder."""
    return TransformerBlock(width, heads)


def gpt(layers: int = 12, width: int = 256, heads: int = 8, vocabulary: int = 1000, positions: int = 1024) -> GPT:
    """A small GPT with learned positions, for at most `positions` tokens."""
    return GPT(layers, width, heads, vocabulary, positions)


def early_exit_gpt(
    layers: int = 12,
    width: int = 256,
    heads: int = 8,
    vocabulary: int = 1000,
    positions: int = 1024,
    settled: float = 1e-6,
) -> EarlyExitGPT:
    """A small GPT that ends early where a block changes its hidden state by less than `settled` on average."""
    return EarlyExitGPT(layers, width, heads, vocabulary, positions, settled)


# -- one call of a model, for `aotc init` -----------------------------------------------------------------------------


def gpt_call() -> tuple[Tensor]:
    """The arguments of one call of `gpt`."""
    return (torch.randint(0, 1000, (1, 128)),)
