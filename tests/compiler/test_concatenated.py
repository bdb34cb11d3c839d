"""What is concatenated is what it was then, whatever is written to it later."""

from __future__ import annotations

from typing import Any

import torch

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, index):
        first, second, third = x * 2, x.exp(), x.sin()
        rows = torch.cat([first, x])
        columns = torch.cat([second, x + 1], 1)
        stacked = torch.stack([third, x])
        first[index] = 7
        second.index_put_((index,), x[:3], accumulate=True)
        third.diagonal()[index] = 1
        return rows, columns, stacked, first, second, third
"""


def test_what_is_written_later_is_not_in_a_concatenation(compile_model: Any) -> None:
    index = {"shape": [3], "dtype": "int64", "init": {"randint": [0, 4]}}
    bucket = {"n": {"range": [4, 8], "tune_at": 4}}
    compiled, module = compile_model(MODEL, inputs={"x": {"shape": ["n", 5]}, "index": index}, buckets=[bucket])
    with torch.no_grad():
        for n in (4, 7):
            x, chosen = torch.randn(n, 5), torch.tensor([3, 0, 3])
            torch.testing.assert_close(compiled(x, chosen), module(x, chosen))


BESIDE_NOTHING = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, image):
        y = x.transpose(1, 2)
        after = torch.cat([y, y[..., :0]], -1).view(-1, 5, 8)
        before = torch.cat([y.half()[:, :, :0], y], 2).view(-1, 5, 8)
        beside_a_list = torch.cat([torch.zeros(0), y], 1).view(-1, 8)
        return after + 1, before + 1, beside_a_list + 1, torch.cat([image[:, :0], image], 1) * 2
"""


def test_one_part_beside_empty_ones_lies_as_in_eager(compile_model: Any) -> None:
    inputs = {"x": {"shape": ["n", 5, 4, 8]}, "image": {"shape": [2, 3, 4, 4], "layout": "channels_last"}}
    compiled, module = compile_model(BESIDE_NOTHING, inputs=inputs, buckets=[{"n": {"range": [2, 6]}}])
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for n in (2, 5):
            x = torch.randn(n, 5, 4, 8)
            expected, given = module(x, image), compiled(x, image)
            torch.testing.assert_close(given, expected)
            assert [each.stride() for each in given] == [each.stride() for each in expected]
