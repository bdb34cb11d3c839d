"""Differences of complex numbers are compiled."""

from __future__ import annotations

from typing import Any

import torch

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, z, x):
        return z - z.flip(0), x - z, torch.sub(z, x, alpha=3), z - 2, 1j - z, x - x.flip(0)
"""


def test_differences_with_complex_numbers_are_those_of_eager(compile_model: Any) -> None:
    inputs = {"z": {"shape": ["n", 3], "dtype": "complex64"}, "x": {"shape": ["n", 3]}}
    compiled, module = compile_model(MODEL, inputs=inputs, buckets=[{"n": {"range": [2, 8], "tune_at": 4}}])
    for n in (2, 4, 5):
        z, x = torch.randn(n, 3, dtype=torch.complex64), torch.randn(n, 3)
        torch.testing.assert_close(compiled(z, x), module(z, x))
