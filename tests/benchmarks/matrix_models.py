"""Models of `matrix.py`: one whose code calls many functions of torch's C shim, and SLEEF's; and a CNN."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Operators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.embedding = nn.Embedding(32, 16)
        self.bfloats = nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pixels = functional.interpolate(self.convolution(image), scale_factor=2.0, mode="bilinear").relu()
        words = self.embedding(tokens)
        states = functional.scaled_dot_product_attention(words, words, words)
        best, where = states.sin().topk(3, dim=-1)
        halves = self.bfloats(words.to(torch.bfloat16))
        spectrum = torch.fft.rfft(words, dim=1).abs()
        ordered = words.exp().sort(dim=1, descending=True).values.cumsum(1)
        filled = torch.zeros(tokens.shape[0], 12).index_put((torch.arange(2), tokens[:, 0] % 12), torch.tensor(1.0))
        scattered = filled.scatter_add(1, tokens % 12, ordered[..., 0]).erf()
        products = (states * 0.5 + words).tanh()
        return pixels.mean((2, 3)), best, where, halves, spectrum, scattered, products, words.std(1).log1p()


def operators() -> Operators:
    return Operators()


def packed() -> nn.Sequential:
    """Products that are autotuned on a CPU, where their weights are frozen."""
    return nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 96), nn.ReLU())


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
