"""A kernel's functions of half-precision values, on the GPU that computes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aotc.compiler.patches import half_precision_functions

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("own_environment")]


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sin(x), torch.cos(x)


def tangent(x: Tensor) -> tuple[Tensor]:
    return (torch.tanh(x),)


def sigmoid(x: Tensor) -> tuple[Tensor]:
    return (torch.sigmoid(x),)


@pytest.mark.parametrize(
    ("functions", "dtype"),
    [
        (pair, torch.float16),
        (tangent, torch.float16),
        (tangent, torch.bfloat16),
        (sigmoid, torch.float16),
        (sigmoid, torch.bfloat16),
    ],
)
def test_every_value_has_the_nearest_one_as_its_result_or_rarely_the_next(functions, dtype: torch.dtype) -> None:
    from torch._inductor.utils import fresh_cache, run_and_get_code

    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()].cuda()
    if functions is sigmoid:
        values = values[(values >= -87) | (values <= -104)]  # between them a float32 has too few bits, eager's too
    with half_precision_functions.apply(), fresh_cache():
        torch._dynamo.reset()
        found, (code,) = run_and_get_code(torch.compile(functions), values)
    assert not any(f".{name}(" in code for name in ("sin", "cos", "tanh", "sigmoid"))
    for result, exact in zip(found, functions(values.double()), strict=True):
        steps = (result.view(torch.int16).int() - exact.to(dtype).view(torch.int16).int()).abs()
        assert steps.max() <= 1
        assert steps.sum() <= 0.0005 * len(values)
