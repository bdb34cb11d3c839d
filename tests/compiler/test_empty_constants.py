"""Frozen weights after one that has no elements are those of the model."""

from __future__ import annotations

from typing import Any

import torch

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.arange(5.).view(5, 1) + 1)

    def forward(self, x):
        return x * 2, self.weights.sum() * 2, self.weights[:, 1:]
"""


def test_constants_after_an_empty_one_are_read_from_their_own_places(compile_model: Any) -> None:
    compiled, module = compile_model(MODEL, inputs={"x": {"shape": [8]}}, weights="frozen")
    x = torch.randn(8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
