"""The gradient of `soft_margin_loss` where the margin is large, as in eager.

torch decomposes it to `target * gradient * (sigmoid(target * x) - 1)`. The difference cancels: of a margin of 14 it has
the error 1.2e-7 where the gradient is 8.6e-7, and of one above 17 it is 0.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.decompositions import decomposed

_MEAN = 1


def gradients_keep_their_digits() -> AbstractContextManager[None]:
    """While active, `1 - sigmoid(y)` is computed as `sigmoid(-y)`."""
    return decomposed({torch.ops.aten.soft_margin_loss_backward.default: _gradient})


def _gradient(gradient: Tensor, x: Tensor, target: Tensor, reduction: int = _MEAN) -> Any:
    if x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    found = -target * gradient * torch.sigmoid(-target * x)
    return found / x.numel() if reduction == _MEAN else found
