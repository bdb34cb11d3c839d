"""A model of many kinds of generated code: a convolution, attention, products, a normalisation, functions of libm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CHANNELS = 32, 6


class Mixed(nn.Module):
    """`[batch, seq, WIDTH]` to `[batch, seq, 4 * WIDTH]`: float32, and in the last quarter what bfloat16 gives."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, CHANNELS, 3, padding=1)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH + CHANNELS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.rounded = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        local = self.conv(x.transpose(1, 2)).transpose(1, 2)
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        y = self.norm(x + F.gelu(self.out(torch.cat([attended, local], -1))))
        functions = y.tanh() + y.sin() * y.cos() + torch.log1p(y * y) + torch.erf(y) + y.abs().pow(1.3)
        half = F.silu(self.rounded(y.bfloat16())).float()
        return torch.cat([y, functions, y.softmax(-1), half], -1)


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed().eval()
