"""[decompositions] The gradient of `soft_margin_loss` cancels.

Expected: -4.2e-9 for a margin of 19.3 (the mean of one element). Seen: 0, from `target * grad_output *
(torch.sigmoid(target * self) - 1)`; `-target * grad_output * torch.sigmoid(-target * self)` has all digits. The
difference of a margin of 14 has the error 1.2e-7 where the gradient is 8.6e-7, and that of one above 17 is 0.

    x = torch.tensor([19.3], requires_grad=True)
    torch.compile(lambda x: F.soft_margin_loss(x, torch.ones(1)))(x).backward()
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch
from aotc.compiler.patches.shared.inductor import decomposed

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0035",
    complete=True,
    operators=("aten.soft_margin_loss",),
    targets=("aten.soft_margin_loss_backward.default(grad_output, self, target, reduction)",),
)

_MEAN = 1


def apply() -> AbstractContextManager[None]:
    """While active, `1 - sigmoid(y)` is computed as `sigmoid(-y)`."""
    return decomposed({torch.ops.aten.soft_margin_loss_backward.default: _gradient})


def _gradient(gradient: Tensor, x: Tensor, target: Tensor, reduction: int = _MEAN) -> Any:
    if x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    found = -target * gradient * torch.sigmoid(-target * x)
    return found / x.numel() if reduction == _MEAN else found


def reproduce(patches: Torch) -> None:
    def gradient(x: Tensor, target: Tensor) -> Any:
        return torch.ops.aten.soft_margin_loss_backward(x.new_ones(()), x, target, 1)

    x, target = torch.linspace(-40, 40, 16), torch.ones(16)
    torch.testing.assert_close(patches.compiled(gradient, x, target)(x, target), gradient(x, target), rtol=1e-5, atol=0)
