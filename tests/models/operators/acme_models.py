"""Modules whose forward calls operators that are not torch's."""

from __future__ import annotations

import acme_cpp  # noqa: F401  its import registers operators
import acme_python  # noqa: F401
import torch
from torch import Tensor, nn


class Uses(nn.Module):
    """Calls one operator of each kind, one of which writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        filled = torch.empty_like(y)
        torch.ops.acme.fill(y, filled)
        scaled = torch.ops.acme.scale(y, 2.5).relu()
        return scaled + torch.ops.acme_cpp.twice(y) + torch.ops.acme_low.add_one(y).sin() + filled


class WithoutFake(nn.Module):
    """Calls an operator that has no fake kernel."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.acme_cpp.without_fake(x) if self.compiled else torch.ops.acme.without_fake(x, 2.0)
