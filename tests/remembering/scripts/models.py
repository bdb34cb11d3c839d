"""Models of the scripts beside this file: a GPT, a convolutional network, a layer, and an encoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        heads = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(batch, seq, width)
        x = x + self.out(y)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """As nanoGPT has it: with targets it gives their loss, too; without, the logits of the last token."""

    def __init__(self, words: int = 50, block_size: int = 16, width: int = 16, heads: int = 2, layers: int = 1) -> None:
        super().__init__()
        self.words, self.block_size, self.width, self.heads, self.layers = words, block_size, width, heads, layers
        self.embed, self.places = nn.Embedding(words, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embed(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ConvNet(nn.Module):
    """As those of timm: a stem, blocks with batch norm and a residual, pooling, a head."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.width, self.num_classes, self.classes = width, classes, classes
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU())
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.silu(x + self.norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Denoiser(nn.Module):
    """A small network with a time and a condition, as those that sample images call it."""

    def __init__(self, channels: int = 4, width: int = 8) -> None:
        super().__init__()
        self.channels, self.width = channels, width
        self.first, self.last = nn.Conv2d(channels, width, 1), nn.Conv2d(width, channels, 1)
        self.time, self.condition = nn.Linear(1, width), nn.Linear(width, width)

    def forward(self, x: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        h = self.first(x) + self.time(timestep[:, None].float())[..., None, None]
        h = h + self.condition(context.mean(1))[..., None, None]
        return self.last(F.silu(h))
