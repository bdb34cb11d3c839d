"""A power of an int is of ints."""

from __future__ import annotations

from typing import Any

import torch

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return 2 ** x, 3 ** x.to(torch.int32) + 1, (-2) ** x.to(torch.int8), 2 ** x.to(torch.uint8), 2 ** (x > 0)
"""


def test_powers_of_a_number_by_ints_are_those_of_eager(compile_model: Any) -> None:
    """Also by negative ones, and where the result is too large for its dtype, or for a float."""
    x = {"shape": ["n"], "dtype": "int64", "init": {"randint": [0, 9]}}
    bucket = {"n": {"range": [2, 16], "tune_at": 4}}
    compiled, module = compile_model(MODEL, inputs={"x": x}, buckets=[bucket])
    for values in ([-70, -1, 0, 1, 2, 31, 62, 63, 64, 100], [5, 6]):
        x = torch.tensor(values)
        torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
