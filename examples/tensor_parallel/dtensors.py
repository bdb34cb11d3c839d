"""A model whose parameters are DTensors: torch's `parallelize_module` splits it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, width]` to the same shape."""
        return x + self.down(F.gelu(self.up(x)))


def feed_forward(width: int = 32, hidden: int = 64, mesh: DeviceMesh | None = None) -> nn.Module:
    """This rank's part; the whole model without a mesh. A manifest's factory gets `mesh` from aotc."""
    torch.manual_seed(0)  # the same weights on every rank
    module = FeedForward(width, hidden)
    if mesh is None:
        return module
    # DTensors in between: ranks of local tensors would take the other parts to be as large as their own.
    return parallelize_module(module, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
