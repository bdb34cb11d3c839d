"""A user's own Triton kernel, made an operator, called in a module's forward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


@triton.jit
def scale_kernel(x, out, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    value = tl.load(x + offsets, mask=inside)
    tl.store(out + offsets, value * factor + value * value, mask=inside)


@torch.library.triton_op("gpu_tests::scale", mutates_args=())
def scale(x: Tensor, factor: float) -> Tensor:
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 256),)
    torch.library.wrap_triton(scale_kernel)[grid](x, out, x.numel(), factor, BLOCK=256)
    return out


class Scaled(nn.Module):
    """A linear layer, the kernel, and an operator of torch that follows it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return scale(self.linear(x), 0.5).relu()


class Unwrapped(Scaled):
    """Launches the kernel as it is, which torch.export cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        out = torch.empty_like(y)
        scale_kernel[(triton.cdiv(y.numel(), 256),)](y, out, y.numel(), 0.5, BLOCK=256)
        return out
