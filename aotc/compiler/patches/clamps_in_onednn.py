"""[inductor][cpu] Freezing fuses `relu`, `clamp` and `hardsigmoid` into oneDNN's operators, which lose NaN.

Expected: NaN, as in eager and in the code that Inductor generates. Seen: 0 of `relu(linear(x))`, the lower limit of
`clamp`, and 1 of `hardsigmoid`: oneDNN takes the other operand where one is NaN. So frozen code gives NaN or 0 by
which candidate is faster.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.inductor import ConfigCheck, both, patterns_narrowed

PATCH = Patch(
    __name__,
    device="cpu",
    severity="silent",
    advisory="AOTC-2026-0051",
    operators=("aten.relu", "aten.clamp", "aten.hardtanh", "aten.hardsigmoid", "aten.hardswish"),
    only=("frozen",),
    targets=("torch._inductor.pattern_matcher:PatternMatcherPass.apply(gm)",),
)

_aten = torch.ops.aten
_CLAMPS = {_aten.relu.default, _aten.clamp_min.default, _aten.clamp_max.default}


def apply() -> AbstractContextManager[None]:
    """While active, what clamps is not fused into an operator of oneDNN."""

    def narrowed(found: Any, check: ConfigCheck) -> ConfigCheck | None:
        of_onednn = getattr(check, "__module__", "") == "torch._inductor.fx_passes.mkldnn_fusion"
        return both(_clamps_nothing, check) if of_onednn else None

    return patterns_narrowed(narrowed)


def _clamps_nothing(match: Any) -> bool:
    return not any(node.target in _CLAMPS for node in match.nodes)


def reproduce(patches: Torch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.convolution = nn.Linear(4, 16), nn.Conv2d(3, 8, 3)
            self.requires_grad_(False)

        def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, ...]:
            y, z = self.linear(x), self.convolution(image)
            return self.linear(x * 2).relu(), F.hardsigmoid(y), self.convolution(image * 2).clamp(-1, 1), (z + 1).relu()

    x, image = torch.full((2, 4), torch.nan), torch.full((1, 3, 8, 8), torch.nan)
    assert_same(partial(patches.library, freezing=True), Model(), x, image)
