"""What is read from a tensor and written to it by one operator is the old value."""

from __future__ import annotations

from typing import Any

import torch

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, index):
        first, second, third = x.relu(), x.exp(), index + 0
        fourth, fifth = x.cos(), x.sin()
        fourth[index[:3]] = fourth[1:].clone()
        fifth[:, 1:] = fifth[:, :-1].clone()
        return (
            first.index_copy(0, index[:3], first[1:]),
            second.index_put((index,), second),
            third.index_put((third,), torch.arange(4)),
            fourth,
            fifth,
        )
"""


def test_rows_are_read_before_any_is_written(compile_model: Any) -> None:
    index = {"shape": [4], "dtype": "int64", "init": {"randint": [0, 4]}}
    compiled, module = compile_model(MODEL, inputs={"x": {"shape": [4, 6]}, "index": index})
    x = torch.randn(4, 6)
    with torch.no_grad():
        for order in ([3, 1, 0, 2], [1, 2, 3, 0], [3, 2, 1, 0]):
            torch.testing.assert_close(compiled(x, torch.tensor(order)), module(x, torch.tensor(order)))
