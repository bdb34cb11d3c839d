"""Rounded quotients and remainders of half precision: eager's, of every value."""

from __future__ import annotations

import pytest
import torch

from aotc.compiler.patches.rounded_quotients import _remainder, _rounded_quotient


@pytest.mark.parametrize("divisor", [2.0, 0.1, -3.0, 7.7, 1e-3, 0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_is_eagers(dtype: torch.dtype, divisor: float) -> None:
    x, y = torch.arange(65536).to(torch.uint16).view(torch.int16).view(dtype), torch.tensor(divisor, dtype=dtype)
    x = x[
        (x.float() / y.float()).isfinite() | x.isinf() | (y == 0)
    ]  # else torch's vectors give NaN, and its numbers not
    for found, expected in (
        (_rounded_quotient(x, y, rounding_mode="floor"), torch.div(x, y, rounding_mode="floor")),
        (_remainder(x, y), torch.remainder(x, y)),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
