"""Loops that write what they return to memory made before them: torch's `scan` and `map`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

MODEL = """
import torch
from torch import nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.map import map

def step(carried, row):
    return carried * 0.5 + row, carried * row

def inner(row, start):
    return torch.cond(row.sum() > 0, lambda a, b: a * b, lambda a, b: a + b, (row, start))

class Model(nn.Module):
    def forward(self, x, start):
        last, rows = scan(step, start, x)
        again, more = scan(step, last, rows.exp())
        chosen = map(inner, rows, start)
        return last, again, more, chosen, rows.sin() @ rows.cos().t(), rows + 1
"""


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="AOTInductor of torch 2.11 refuses it")
def test_what_each_iteration_gives_is_returned(compile_model: Any) -> None:
    bucket = {"rows": {"range": [1, 9], "tune_at": 4}}
    inputs = {"x": {"shape": ["rows", 3]}, "start": {"shape": [3]}}
    compiled, module = compile_model(MODEL, inputs=inputs, buckets=[bucket])
    with torch.no_grad():
        for rows in (1, 4, 9):
            x, start = torch.randn(rows, 3), torch.randn(3)
            for _ in range(2):  # the second time in memory that holds what the first has left
                torch.testing.assert_close(compiled(x, start), module(x, start))
