"""Models whose operators are kernels on a GPU, and one whose operators are torch's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attends(nn.Module):
    """Attention with a causal mask, with grouped heads and a mask of bools, with heads that no template takes; and
    written out, which Inductor would replace by torch's."""

    def forward(self, q: Tensor, few: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        causal = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        grouped = F.scaled_dot_product_attention(q, few, few, mask, enable_gqa=True)
        before = torch.arange(few.shape[2], device=q.device) <= mask[0, 0, 0].sum()  # a mask that the graph computes
        step = F.scaled_dot_product_attention(q[:, :, :1], few, few, before[None, None, None], enable_gqa=True)
        narrow = q[..., :8]
        composed = F.scaled_dot_product_attention(narrow, narrow, narrow)
        written = torch.softmax(q @ q.transpose(-1, -2) * 0.125, -1) @ q
        return causal, grouped, step, composed, written


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plane, self.line, self.point = (
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.Conv1d(16, 32, 5),
            nn.Conv2d(16, 16, 1),
        )
        self.wide, self.up = (
            nn.Conv2d(16, 16, 3, padding=2, dilation=2),
            nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1),
        )
        self.linear = nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        features = self.line(self.point(self.up(self.wide(F.gelu(self.plane(x))))).flatten(2))
        position = torch.arange(48, device=x.device).to(x.dtype)  # as DETR's
        return (
            (self.linear(features.transpose(1, 2)) / 2 ** torch.div(position, 2, rounding_mode="floor")).topk(4).values
        )


class Left(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.ConvTranspose2d(3, 4, 2, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.transposed(x)
        z = torch.fft.rfft(y).real
        return z + torch.linalg.svdvals(x).sum()
