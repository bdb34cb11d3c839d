"""Values at which torch's compiler has been wrong on a GPU, by default and with max-autotune: pytorch #175966, #184408,
#186164, #187580 and #195845."""

from __future__ import annotations

import pytest
import torch
from gpu_runs import Gpu

from aotc.models.decided_values import first_wrong_value

pytestmark = pytest.mark.cuda

EXTREME = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 3.4e38, -2.0, 1e-40]
DIVIDED = [14.999999, 26.999999, 13.999999, 148.0, 1073.0, 2112.0, -148.0, 0.3, -26.999999]
BY = [3.0, 3.0, 7.0, 37.0, 37.0, 33.0, 37.0, 0.1, 3.0]
WHOLE = [-7, -3, -1, 0, 1, 2, 3, 10**12 + 1, 1 - 10**12]


@pytest.mark.parametrize("model", ["extreme-values", "extreme-values-autotuned"])
@pytest.mark.parametrize("short", [range(2, 11), range(-11, -2), [127] * 9, [-128] * 9])
def test_extreme_values_are_eagers(gpu: Gpu, model: str, short: list[int]) -> None:
    compiled, module = gpu.loaded(model)
    given = [torch.tensor(values, device="cuda") for values in (EXTREME, DIVIDED, BY, WHOLE)]
    given.append(torch.tensor(list(short), device="cuda", dtype=torch.int8))
    expected = list(module(*given))
    found = first_wrong_value(expected, list(compiled(*given)), lambda leaves: list(module(*leaves)), given)
    assert found is None, found


@pytest.mark.parametrize("model", ["column-sums", "column-sums-autotuned", "column-sums-of-a-range"])
def test_columns_are_summed_over_their_rows_alone(gpu: Gpu, model: str) -> None:
    """The last block of rows is not full: what lies beyond the last row is 0.25 if it is counted."""
    compiled, module = gpu.loaded(model)
    for rows in (40961, 1025, 2) if model.endswith("range") else (40961,):
        x = torch.zeros(rows, 129, device="cuda", dtype=torch.bfloat16)
        maxima, sums = compiled(x)
        torch.testing.assert_close(sums, torch.full_like(sums, rows * 0.25), rtol=0, atol=0)
        torch.testing.assert_close(maxima, module(x)[0], rtol=0, atol=0)
