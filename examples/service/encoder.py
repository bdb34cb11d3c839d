"""A sentence encoder in plain torch. The builder imports this file; the service does not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Attention over the real tokens, then a feed-forward part: `[batch, seq, width]` to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class Encoder(nn.Module):
    """Token ids, int64 `[batch, seq]`, with a mask of the real ones, bool `[batch, seq]`, to the states of the tokens,
    float32 `[batch, seq, width]`, and their mean over the real tokens, `[batch, width]`."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, -1e9)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, bias)
        weight = mask[:, :, None].to(x.dtype)
        return x, (x * weight).sum(1) / weight.sum(1).clamp(min=1)


def encoder(layers: int = 4, width: int = 256, heads: int = 4, vocabulary: int = 1000, positions: int = 128) -> Encoder:
    """For at most `positions` tokens."""
    return Encoder(layers, width, heads, vocabulary, positions)
