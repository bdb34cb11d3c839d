"""Numbers that forward assigns to elements and rows."""

from __future__ import annotations

from typing import Any

import torch

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        doubled, empty = x * 2, torch.zeros(x.shape[0], 3)
        doubled[0, 0] = 1
        doubled[-1, -1] = float("-inf")
        empty[0, 0] = 3
        empty[:, 1] = torch.tensor(4)
        empty[-1][2] += 5
        empty[0].copy_(6)
        x[0, 0] = 1
        return doubled, empty, x + 1
"""


def test_a_number_is_assigned_to_an_element(compile_model: Any) -> None:
    bucket = {"rows": {"range": [2, 8], "tune_at": 4}}
    compiled, module = compile_model(MODEL, inputs={"x": {"shape": ["rows", 3]}}, buckets=[bucket])
    with torch.no_grad():
        for rows in (2, 4, 7):
            given = torch.randn(rows, 3)
            other = given.clone()
            torch.testing.assert_close(compiled(given), module(other))
            assert torch.equal(given, other)
