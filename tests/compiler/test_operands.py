"""What a condition or a loop is given is what it was then, whatever is written to it later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

MODEL = """
import torch
from torch import nn
from torch._higher_order_ops import while_loop

class Model(nn.Module):
    def forward(self, x):
        first, second, third = x @ x.mT, x.mT @ x, x.cumsum(0)
        chosen = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a * 2, (first,))
        part = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (second[1:3],))
        _, halved = while_loop(
            lambda i, a: i < 3, lambda i, a: (i + 1, a / 2 + third), (torch.zeros((), dtype=torch.int64), third.clone())
        )
        first[first > 0] = 0.5
        second[second > 0] = 0.5
        third[third > 0] = 0.5
        return chosen, part, halved, first, second, third
"""


def test_what_is_written_later_is_not_what_branches_and_loops_are_given(compile_model: Any) -> None:
    compiled, module = compile_model(MODEL, inputs={"x": {"shape": [4, 4]}}, buckets=[{}])
    with torch.no_grad():
        for sign in (1, -1):
            x = sign * torch.rand(4, 4) + torch.randn(4, 4).clamp(-0.3, 0.3)
            torch.testing.assert_close(compiled(x), module(x))


PARTS = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        part, turned, wide = x.sin(), x.cos(), x.tanh()
        before = torch.cat([turned, turned + 1], -1)
        chosen = [
            torch.cond(x.sum() > 0, lambda a: (a.sum(0), a * 2), lambda a: (a.amax(0), a + 1), (given,))
            for given in (part, turned.mT, wide[1:], wide[0].expand(2, -1))
        ]
        return chosen, before, torch.cat([part, part * 2], -1), torch.cat([wide, x], -1)
"""


GIVEN_BACK = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(4, 3, 2))

    def forward(self, x, at, row):
        one, other = torch.cond(x.sum() > 0, lambda x: (x, x), lambda x: (x[:], x * 2), (x,))
        self.memory[at] = row
        self.memory[at, 1:] = row[:1]
        return one + 1, other + 1, self.memory * 2
"""


def test_branches_return_operands_and_a_row_is_set_by_an_integer_tensor(compile_model: Any) -> None:
    index = {"shape": [], "dtype": "int64", "init": {"randint": [0, 4]}}
    inputs = {"x": {"shape": [4]}, "at": index, "row": {"shape": [3, 2]}}
    compiled, module = compile_model(GIVEN_BACK, inputs=inputs)
    eager = type(module)()
    with torch.no_grad():
        for step, sign in enumerate((1, -1, 1)):
            given = sign * torch.rand(4), torch.tensor(step - 1), torch.randn(3, 2)
            torch.testing.assert_close(compiled(*given), eager(*given))
    assert torch.equal(module.memory, eager.memory)


def test_an_operand_that_a_branch_gives_back_as_a_result_is_refused(compile_model: Any) -> None:
    """Eager's is a view of the input, and torch's compiler makes a copy."""
    with pytest.raises(AssertionError, match="share memory differently from the model's"):
        compile_model(
            GIVEN_BACK.replace("return one + 1", "return one"),
            inputs={
                "x": {"shape": [4]},
                "at": {"shape": [], "dtype": "int64", "init": {"randint": [0, 4]}},
                "row": {"shape": [3, 2]},
            },
        )


def test_branches_read_what_is_a_part_of_a_concatenation_where_it_lies(compile_model: Any) -> None:
    for rows in (5, {"range": [3, 9], "tune_at": 6}):
        compiled, module = compile_model(PARTS, inputs={"x": {"shape": ["rows", 11]}}, buckets=[{"rows": rows}])
        with torch.no_grad():
            for sign in (1, -1):
                x = sign * torch.rand(5, 11)
                torch.testing.assert_close(compiled(x), module(x))
