"""A view that is made of a view's memory begins where that view does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aotc

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        late = x[x.shape[0] // 2 :]
        return (
            late.as_strided((3, 2), (5, 1)), x.select(1, -1).as_strided((4,), (5,)), late.as_strided((3,), (1,), 2),
            x.sin()[1:].as_strided((3, 2), (5, 1)),
        )
"""


def test_views_of_views_are_those_of_eager(compile_model: Any) -> None:
    compiled, module = compile_model(
        MODEL, inputs={"x": {"shape": ["n", 5]}}, buckets=[{"n": {"range": [8, 16], "tune_at": 8}}]
    )
    with torch.no_grad():
        for n in (8, 11, 16):
            x = torch.randn(n, 5)
            torch.testing.assert_close(compiled(x), module(x))
        with pytest.raises(aotc.MissError, match=r"from the beginning of its storage.*which is 5 elements behind"):
            compiled(torch.randn(9, 5)[1:])
