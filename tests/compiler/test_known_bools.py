"""Comparisons of masks that a kernel's values alone decide."""

from __future__ import annotations

from typing import Any

import torch

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        ones = ~torch.zeros(x.shape[0], 3).to(torch.bool)
        nones = ~ones
        return (
            torch.where(ones == True, x, -x),
            torch.where(ones == False, x, -x),
            torch.where(nones != True, x, -x),
            torch.where(nones != False, x, -x),
            torch.where(ones == (x > 0), x, 2 * x),
            torch.where(nones == (x > 0), x, 2 * x),
        )
"""


def test_masks_that_are_known_are_compared(compile_model: Any) -> None:
    bucket = {"rows": {"range": [2, 8], "tune_at": 4}}
    compiled, module = compile_model(MODEL, inputs={"x": {"shape": ["rows", 3]}}, buckets=[bucket])
    with torch.no_grad():
        for rows in (2, 4, 7):
            x = torch.randn(rows, 3)
            for got, expected in zip(compiled(x), module(x), strict=True):
                assert torch.equal(got, expected)
