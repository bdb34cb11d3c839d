"""Functions of half-precision values on a GPU: as exact as such values show, wherever they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor import decomposition
from torch._subclasses import FakeTensorMode

from aotc.compiler.patches import half_precision_functions
from aotc.compiler.patches.half_precision_functions import (
    cosine,
    hyperbolic_tangent,
    sigmoid,
    sine,
)

EVERY = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
SINES = [(sine, torch.sin), (cosine, torch.cos)]
FUNCTIONS = [*((*pair, torch.float16) for pair in SINES)] + [
    (shorter, exact, dtype)
    for dtype in (torch.float16, torch.bfloat16)
    for shorter, exact in ((hyperbolic_tangent, torch.tanh), (sigmoid, torch.sigmoid))
]
aten = torch.ops.aten


def finite(dtype: torch.dtype) -> Tensor:
    values = EVERY.view(dtype)
    return values[values.isfinite()]


FULL = -87
"""From here on a float32 has a sigmoid in full precision; eager's, too, are far off below, until they are zero."""
ZERO = -104


@pytest.mark.parametrize(("shorter", "exact", "dtype"), FUNCTIONS)
def test_every_value_has_the_nearest_one_as_its_result_or_rarely_the_next(shorter, exact, dtype) -> None:
    values = finite(dtype)
    if exact is torch.sigmoid:
        values = values[(values >= FULL) | (values <= ZERO)]
    nearest = exact(values.double()).to(dtype)
    steps = (shorter(values).view(torch.int16).int() - nearest.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    assert steps.sum() <= 0.0002 * len(values)


@pytest.mark.parametrize(("shorter", "exact"), SINES)
def test_before_it_is_rounded_a_sine_is_as_exact_as_a_float32(shorter, exact, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fused kernel, whose intermediate results are not rounded to float16."""
    monkeypatch.setattr(torch.Tensor, "to", lambda self, _dtype: self)
    values = finite(torch.float16)
    assert (shorter(values).double() - exact(values.double())).abs().max() < 2**-23


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shorter", "exact", "bits"), [(hyperbolic_tangent, torch.tanh, 19), (sigmoid, torch.sigmoid, 18)]
)
def test_before_it_is_rounded_a_result_is_far_more_exact_than_half_precision(
    shorter, exact, bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "to", lambda self, _dtype: self)
    values = finite(dtype)
    values = values[values >= FULL] if exact is torch.sigmoid else values[values != 0]
    exactly = exact(values.double())
    assert ((shorter(values).double() - exactly) / exactly).abs().max() < 2**-bits


@pytest.mark.parametrize(("shorter", "exact", "dtype"), FUNCTIONS)
def test_values_that_are_not_finite_have_exact_results_and_zero_keeps_its_sign(shorter, exact, dtype) -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=dtype)
    assert torch.equal(shorter(values).nan_to_num(7), exact(values).nan_to_num(7))
    assert torch.equal(shorter(values[-2:]).signbit(), exact(values[-2:]).signbit())


@pytest.mark.parametrize(
    ("device", "dtype", "sines", "exponentials"),
    [
        ("cuda", torch.float16, True, True),
        ("cuda", torch.bfloat16, False, True),
        ("cuda", torch.float32, False, False),
        ("cpu", torch.float16, False, False),
    ],
)
def test_only_half_precision_values_on_a_gpu_are_computed_so(
    device: str, dtype: torch.dtype, sines: bool, exponentials: bool
) -> None:
    """A bfloat16 may be as large as a float32."""
    expected = {aten.sin.default: sines, aten.cos.default: sines}
    expected |= {aten.tanh.default: exponentials, aten.sigmoid.default: exponentials}
    tables = [decomposition.decompositions, decomposition.fast_random_decomps()]  # that Inductor may choose from
    assert not any(function in table for table in tables for function in expected)
    with half_precision_functions.apply(), FakeTensorMode():
        x = torch.empty(3, device=device, dtype=dtype)
        for table in tables:
            results = {function: table[function](x) for function in expected}
            assert {function: result is not NotImplemented for function, result in results.items()} == expected
            made = [result for result in results.values() if result is not NotImplemented]
            assert all((result.dtype, result.shape) == (dtype, x.shape) for result in made)
    assert not any(function in table for table in tables for function in expected)
