"""Rounded quotients of floats and their remainders are those of eager."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y, n):
        return (
            x // y, x // 0.1, 1.0 // y, n // y, x // n, torch.div(x, y, rounding_mode="trunc"), n // 3,
            x % y, x % 0.1, 1.0 % y, n % y, x % n, n % 3, (x[:, None] // y)[0], x // x.shape[0], x % x.shape[0],
        )
"""
SPECIAL = (0.0, -0.0, 0.1, 0.3, 0.9, 1.0, -1.0, 3.0, 5.0, -7.0, 49.0, 1e6, float("inf"), -float("inf"), float("nan"))
PAIRS = torch.tensor([*itertools.product(SPECIAL, SPECIAL)], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_rounded_quotients_and_remainders_are_as_exact_as_eagers(compile_model: Any, dtype: torch.dtype) -> None:
    """Of what no power of two divides, by infinity, by zero, and by numbers."""
    named = {"shape": ["n"], "dtype": str(dtype).removeprefix("torch.")}
    ints = {"shape": ["n"], "dtype": "int64", "init": "ones"}
    compiled, module = compile_model(
        MODEL, inputs={"x": named, "y": named, "n": ints}, buckets=[{"n": {"range": [2, 300], "tune_at": 16}}]
    )
    x, y = PAIRS.to(dtype).T.contiguous()
    for count in (len(PAIRS), 7):
        inputs = x[-count:], y[-count:], torch.arange(1, count + 1)
        torch.testing.assert_close(compiled(*inputs), module(*inputs), rtol=0, atol=0, equal_nan=True)
