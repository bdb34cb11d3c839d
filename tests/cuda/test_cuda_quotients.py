"""Rounded quotients of floats and their remainders on a GPU, whose quotients are approximate."""

from __future__ import annotations

import pytest
import torch
from gpu_runs import Gpu

pytestmark = pytest.mark.cuda

COUNT = 4096


@pytest.mark.parametrize("divisor", [0.0, 0.1, 1.0, 3.0, float("inf"), "equal"])
def test_rounded_quotients_and_remainders_are_eagers(gpu: Gpu, divisor: float | str) -> None:
    compiled, module = gpu.loaded("quotients")
    x = torch.arange(COUNT, device="cuda", dtype=torch.float32) - 1000
    y = x.clone() if isinstance(divisor, str) else torch.full_like(x, divisor)
    torch.testing.assert_close(compiled(x, y), module(x, y), rtol=0, atol=0, equal_nan=True)
