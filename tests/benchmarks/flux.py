"""A diffusion transformer of Flux's form in plain `torch.nn`, with random weights: what a large model's build costs.

Double blocks have weights for the image and for the text, and one attention over both; single blocks run attention and
the feed-forward part side by side. The prompt is a parameter, so that the model has one input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _attend(qkv: Tensor, angles: Tensor, heads: int) -> Tensor:
    """Attention over `[batch, tokens, 3 × width]`, with rotary positions of `[tokens, width / heads / 2]`."""
    batch, tokens, wide = qkv.shape
    query, key, value = qkv.view(batch, tokens, 3, heads, wide // (3 * heads)).permute(2, 0, 3, 1, 4).unbind(0)
    query, key = (_rotated(F.rms_norm(each, each.shape[-1:]), angles[:tokens]) for each in (query, key))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, tokens, wide // 3)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    one, other = x.float().chunk(2, dim=-1)
    cos, sin = angles.float().cos(), angles.float().sin()
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1).type_as(x)


class _Stream(nn.Module):
    """The weights of one of a double block's two streams."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))


def _modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class DoubleBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.image, self.text = _Stream(width), _Stream(width)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        streams, xs = (self.text, self.image), (text, image)
        parts = [stream.modulation(F.silu(condition)).chunk(6, dim=-1) for stream in streams]
        qkv = [stream.qkv(_modulated(x, part[0], part[1])) for stream, x, part in zip(streams, xs, parts, strict=True)]
        mixed = _attend(torch.cat(qkv, dim=1), angles, self.heads).split([text.shape[1], image.shape[1]], dim=1)
        done = []
        for stream, x, part, attended in zip(streams, xs, parts, mixed, strict=True):
            x = x + part[2] * stream.out(attended)
            done.append(x + part[5] * stream.feed_forward(_modulated(x, part[3], part[4])))
        return done[1], done[0]


class SingleBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.modulation = nn.Linear(width, 3 * width)
        self.into = nn.Linear(width, 7 * width)
        self.out = nn.Linear(5 * width, width)

    def forward(self, x: Tensor, condition: Tensor, angles: Tensor) -> Tensor:
        scale, shift, gate = self.modulation(F.silu(condition)).chunk(3, dim=-1)
        qkv, wide = self.into(_modulated(x, scale, shift)).split([3 * self.width, 4 * self.width], dim=-1)
        mixed = torch.cat((_attend(qkv, angles, self.heads), F.gelu(wide, approximate="tanh")), dim=-1)
        return x + gate * self.out(mixed)


class Flux(nn.Module):
    """Latent patches `[batch, pixels, channels]` to the same shape."""

    def __init__(self, double: int, single: int, width: int, heads: int, channels: int, prompt: int, most: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(channels, width), nn.Linear(width, channels)
        self.prompt = nn.Parameter(torch.randn(1, prompt, width))
        self.condition = nn.Linear(channels, width)
        self.double_blocks = nn.ModuleList(DoubleBlock(width, heads) for _ in range(double))
        self.single_blocks = nn.ModuleList(SingleBlock(width, heads) for _ in range(single))
        rates = 10000.0 ** -torch.linspace(0, 1, width // heads // 2)
        self.register_buffer("angles", torch.outer(torch.arange(prompt + most), rates), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        condition = self.condition(x.mean(dim=1, keepdim=True))
        image, text = self.into(x), self.prompt.expand(x.shape[0], -1, -1)
        for block in self.double_blocks:
            image, text = block(image, text, condition, self.angles)
        joint = torch.cat((text, image), dim=1)
        for block in self.single_blocks:
            joint = block(joint, condition, self.angles)
        return self.out(F.layer_norm(joint[:, text.shape[1] :], joint.shape[-1:]))


def flux(double: int = 2, single: int = 4, width: int = 3072, heads: int = 24, prompt: int = 512) -> Flux:
    """By default 1.3 billion parameters, with the blocks of Flux.1 of which the whole model has 19 and 38."""
    return Flux(double, single, width, heads, channels=64, prompt=prompt, most=4096)
