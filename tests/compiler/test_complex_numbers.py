"""Complex tensors, and numbers beside them, are those of eager."""

from __future__ import annotations

from typing import Any

import torch

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, z, x):
        differences = z - z.flip(0), x - z, torch.sub(z, x, alpha=3), z - 2, 1j - z, x - x.flip(0)
        quotients = z / 2, z / 2j, x / 2j, 2 / z, z.sum() / 3, x / x.shape[0]
        chosen = torch.where(x > 0, z, 0), z.masked_fill(x > 0, 1j), z != 1j, z == 2, x != 2
        filled = torch.full_like(z, 2j), torch.full((2,), 1j), torch.zeros(3, dtype=z.dtype) + z, z.clone().fill_(3)
        return differences, quotients, chosen, filled, torch.full((2,), 1.5), torch.scalar_tensor(2)
"""


def test_complex_tensors_and_numbers_beside_them_are_those_of_eager(compile_model: Any) -> None:
    inputs = {"z": {"shape": ["n", 3], "dtype": "complex64"}, "x": {"shape": ["n", 3]}}
    compiled, module = compile_model(MODEL, inputs=inputs, buckets=[{"n": {"range": [2, 8], "tune_at": 4}}])
    for n in (2, 4, 5):
        z, x = torch.randn(n, 3, dtype=torch.complex64), torch.randn(n, 3)
        z[0, 0], z[1, 1] = 1j, 2
        torch.testing.assert_close(compiled(z, x), module(z, x))
