"""A model that rounds to half precision by itself, with the option that the guide to building names for it."""

from __future__ import annotations

from typing import Any

import torch

MODEL = """
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return (x * 3).bfloat16().float() * 2, (x * 3).half().float() * 2
"""


def test_it_is_rounded_as_in_eager(compile_model: Any) -> None:
    options = {"emulate_precision_casts": True}
    compiled, module = compile_model(MODEL, inputs={"x": {"shape": [40, 24]}}, options=options)
    x = torch.randn(40, 24)
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
