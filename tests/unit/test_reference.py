"""The reference is in float64 where the model says float32 on purpose, too: else nothing of eager's error is seen."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from processes import run_python
from torch import Tensor

from aotc.models.float64_reference import in_float64
from aotc.models.tolerance import judge


def embedding(timestep: Tensor, *, dtype: torch.dtype = torch.float32, another_way: bool = False) -> Tensor:
    """The sines of a timestep, computed in float32 on purpose; another way: as a compiler may order the same."""
    steps = torch.arange(128, dtype=dtype)
    exponents = steps * (-math.log(10000) / 128) if another_way else -math.log(10000) * steps / 128
    angles = timestep.to(dtype)[:, None] * (exponents.exp())[None]
    return torch.cat([angles.cos(), angles.sin()], -1)


def in_reference(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    with in_float64():
        return function(value)


@pytest.mark.parametrize("timestep", [0.7, 3.5, 999.0, 700.0, 3500.0, 123.456])
def test_another_order_of_code_that_is_float32_on_purpose_is_right(timestep: float) -> None:
    given = torch.tensor([timestep])
    exact = in_reference(embedding, given.double())
    assert exact.dtype == torch.float64
    assert torch.equal(exact, embedding(given.double(), dtype=torch.float64))
    eager, compiled = embedding(given), embedding(given, another_way=True)
    assert judge(compiled, eager, exact).ok


def test_what_is_wrong_in_code_that_is_float32_on_purpose_is_found() -> None:
    given = torch.tensor([700.0, 3.5, 12.0, 0.5])
    exact, eager = in_reference(embedding, given.double()), embedding(given)
    one, row = eager.clone(), eager.clone()
    one[2, 77] += 0.01
    row[3] = eager[2]
    for wrong in (one, row, eager * 1.001):
        assert not judge(wrong, eager, exact).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_cast_rounds_as_the_model_asks(dtype: torch.dtype) -> None:
    """So code that leaves out a rounding which the model asks for is still told from it."""
    given = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = in_reference(lambda x: x.to(dtype).float(), given)
    assert exact.dtype == torch.float64 and torch.equal(exact, given.to(dtype).double())


def test_products_of_16_bits_on_purpose_are_exact_between_their_casts() -> None:
    a, b = (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    with in_float64():
        exact = a.double().bfloat16() @ b.bfloat16()
    assert torch.equal(exact, a.bfloat16().double() @ b.bfloat16().double())


def test_factories_constants_and_tensors_of_the_model_s_own_do_not_narrow_it() -> None:
    own = torch.ones(3, 3)  # no buffer, so no module makes it float64

    def model(x: Tensor) -> Tensor:
        return (x @ own + torch.zeros(3) + torch.full((3,), 0.1, dtype=torch.float32)) / torch.tensor([3.0])

    given = torch.rand(2, 3, dtype=torch.float64)
    exact = in_reference(model, given)
    assert exact.dtype == torch.float64
    assert torch.allclose(exact, (given.sum(1, keepdim=True) + 0.1).expand(2, 3) / 3, rtol=1e-15, atol=0)
    assert torch.get_default_dtype() == torch.float32 and (given.float() @ own).dtype == torch.float32


def test_what_is_written_in_place_is_written() -> None:
    own, given = torch.zeros(3), torch.ones(3, dtype=torch.float64)

    def model(x: Tensor) -> Tensor:
        own.view(3)[1:].copy_(x[1:])
        return x.add_(1)

    assert in_reference(model, given) is given
    assert own.tolist() == [0, 1, 1] and own.dtype == torch.float32


def test_an_operator_without_float64_does_not_keep_the_rest_from_it() -> None:
    library = torch.library.Library("aotc_test_reference", "DEF")
    library.define("doubled(Tensor x) -> Tensor")

    def doubled(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("expected float32")
        return x * 2

    library.impl("doubled", doubled, "CompositeExplicitAutograd")
    given = torch.rand(4, dtype=torch.float64)
    exact = in_reference(lambda x: torch.ops.aotc_test_reference.doubled(x).exp(), given)
    assert torch.equal(exact, (given.float() * 2).double().exp())


def test_complex_numbers_are_complex128_and_bits_stay_bits() -> None:
    given = torch.tensor([1.5, 2.5])
    assert in_reference(lambda x: torch.fft.fft(x.to(torch.complex64)), given.double()).dtype == torch.complex128
    assert in_reference(lambda x: x.view(torch.int32), given).tolist() == given.view(torch.int32).tolist()


def test_no_compiler_is_imported_for_it() -> None:
    run_python(
        "import sys, torch; from aotc.models.float64_reference import in_float64\n"
        "with in_float64(): assert torch.ones(2).float().dtype == torch.float64\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
