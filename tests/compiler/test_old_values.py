"""What is read from a tensor and written to it by one operator is the old value."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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


def _gives_eagers_values_and_buffers(compile_model: Any, text: str, shape: list[int]) -> None:
    compiled, module = compile_model(text, inputs={"x": {"shape": shape}})
    eager = copy.deepcopy(module)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x.clone()), eager(x.clone()))
            torch.testing.assert_close(dict(module.named_buffers()), dict(eager.named_buffers()))


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
    _gives_eagers_values_and_buffers(compile_model, BUFFERS, [3, 4])


ORDERED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.arange(100.).view(5, 4, 5))

    def forward(self, x):
        before = self.last * 1
        self.last[0] = x
        before[:, 2:] *= 2
        return before
"""


def test_a_kernel_that_reads_comes_before_the_one_that_writes(compile_model: Any) -> None:
    """With torch 2.11 it came after it, where both have the same loops."""
    _gives_eagers_values_and_buffers(compile_model, ORDERED, [4, 5])


SHIFTED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.arange(64.).view(4, 16))

    def forward(self, x):
        self.last.diagonal().fill_(3)
        self.last[1:] = self.last[:-1].clone()
        self.last[0] = -2
        x.index_add_(1, torch.tensor([0, 0]), x.clone())
        x[1:] *= 2
        return torch.nn.functional.rms_norm(x, (2,))
"""


def test_what_was_written_and_is_read_is_known_as_the_tensor_that_is_written_next(compile_model: Any) -> None:
    _gives_eagers_values_and_buffers(compile_model, SHIFTED, [2, 2])


RETURNED = """
import torch
from torch import nn

@torch.library.custom_op("aotc_old_values::fill_row", mutates_args=("into",))
def fill_row(into: torch.Tensor, x: torch.Tensor) -> None:
    into[1] = x[0]

@fill_row.register_fake
def _(into, x):
    return None

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for number in range(9):
            self.register_buffer(f"memory_{number}", torch.arange(12.).view(4, 3) + number)

    def forward(self, x, at, given):
        *memories, before, filled = (self.get_buffer(f"memory_{number}") for number in range(9))
        first = memories[0].slice_scatter(x, 0, 1, 2)
        second = torch.diagonal_scatter(memories[1], x[0])
        third = memories[2].index_copy(0, at, x)
        fourth = memories[3].index_put((at,), x)
        fifth = memories[4].index_add(0, at, x)
        half = memories[5].slice_scatter(x, 0, 1, 2)
        sixth = half.slice_scatter(x + 1, 0, 2, 3)
        seventh = memories[6].slice_scatter(x, 0, 1, 2)
        changed = given.slice_scatter(x, 0, 1, 2)
        for memory, new in zip(memories, (first, second, third, fourth, fifth, sixth, seventh)):
            memory.copy_(new)
        given.copy_(changed)
        seventh.add_(1)
        fill_row(filled, x)
        before.copy_(filled)
        old = filled.clone()
        filled.copy_(x.expand(4, 3))
        parts = [first[1:], *second.split(2), third.t()]
        more = (half, sixth, seventh, changed, old)
        return {"whole": [first, second, third, fourth, fifth], "parts": parts, "more": more}
"""


def test_a_result_stays_as_it_is_though_a_buffer_or_an_input_became_equal_to_it(compile_model: Any) -> None:
    index = {"shape": [1], "dtype": "int64", "init": {"constant": 1}}
    inputs = {"x": {"shape": [1, 3]}, "at": index, "given": {"shape": [4, 3]}}
    compiled, module = compile_model(RETURNED, inputs=inputs)
    models = (compiled, copy.deepcopy(module))
    given = (torch.ones(4, 3), torch.ones(4, 3))
    results: list[list[Any]] = [[], []]
    with torch.no_grad():
        for step in (1, 3, 2):
            for model, memory, found in zip(models, given, results, strict=True):
                found.append(model(torch.full((1, 3), float(step)), torch.tensor([step]), memory))
        torch.testing.assert_close(*results)
        for found in results:
            for tensor in tree_leaves(found):
                tensor.add_(100)  # the caller may write to a result: to its views, and to nothing else
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*given)
        torch.testing.assert_close(dict(module.named_buffers()), dict(models[1].named_buffers()))
