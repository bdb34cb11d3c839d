"""Where cuBLASLt's fused bias is offered: in races of `addmm` alone, whatever its bias is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._inductor.utils import fresh_cache

from aotc.compiler.patches.performance.fused_bias import fused_bias_offered


class Biased(nn.Module):
    def __init__(self, bias: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return torch.addmm(self.bias(x + 1), left, right)


@pytest.mark.parametrize(
    "bias",
    [
        pytest.param(lambda x: x[0], id="a row of what is computed"),
        pytest.param(lambda x: x[:, :1], id="a column of what is computed"),
        pytest.param(lambda x: x[0].expand(8, 16), id="a row, repeated"),
    ],
)
def test_without_autotuning_nothing_races(monkeypatch: pytest.MonkeyPatch, bias: Callable[[Tensor], Tensor]) -> None:
    raced: list[Any] = []
    tune = AlgorithmSelectorCache.do_autotuning
    monkeypatch.setattr(
        AlgorithmSelectorCache, "do_autotuning", lambda *args, **kwargs: raced.append(args) or tune(*args, **kwargs)
    )
    inputs = torch.randn(8, 16), torch.randn(8, 4), torch.randn(4, 16)
    module = Biased(bias)
    torch._dynamo.reset()
    with fused_bias_offered(), torch.no_grad(), fresh_cache():
        result = torch.compile(module)(*inputs)
    assert torch.allclose(result, module(*inputs), atol=1e-5) and not raced
