"""A buffer that is written, and then another tensor in its name: further old values are in `patched_models.py`."""

from __future__ import annotations

import copy
from typing import Any

import torch

BUFFERS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for number, name in enumerate(["first", "second", "third", "fourth"]):
            self.register_buffer(name, torch.arange(12.).view(3, 4) + number)

    def forward(self, x):
        changed = self.first.slice_scatter(self.first.narrow(1, 0, 1) * 2, 1, 0, 1)
        self.first.copy_(x)
        old = self.second
        self.second[0] = 2
        self.second = self.second + 1
        seen = self.third.select_scatter(x[0], 0, 1)
        self.third.copy_(seen * 2)
        self.fourth[1] = x[1]
        self.fourth[:, 2:] += 1
        return changed, old, seen[1], x * 2
"""


def test_what_a_buffer_would_have_been_is_kept_beside_what_it_becomes(compile_model: Any) -> None:
    compiled, module = compile_model(BUFFERS, inputs={"x": {"shape": [3, 4]}})
    eager = copy.deepcopy(module)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 4)
            torch.testing.assert_close(compiled(x.clone()), eager(x.clone()))
            torch.testing.assert_close(dict(module.named_buffers()), dict(eager.named_buffers()))
