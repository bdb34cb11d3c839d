"""When an output counts as right.

The rule is that of PyTorch's benchmark suite (`torch._dynamo.utils.same`): both are compared with a float64 reference,
and the compiled error may be a small multiple of eager's, plus a floor. What is eager here is the same computation in
another order, so its error is of the kind that a right compiled output has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aotc.models.tolerance import QUANTISED, floor_of, judge, may_use_tf32
from aotc.verify.comparison import RoundingTo8Bits

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
MILLION = 1_000_000


def triple(dtype: torch.dtype, inner: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """A matmul: summed in blocks as a compiler would, summed at once, and in float64."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(64, inner, dtype=torch.float64, generator=generator).to(dtype)
    b = torch.randn(inner, 96, dtype=torch.float64, generator=generator).to(dtype)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    blocks = [x.to(wide) @ y.to(wide) for x, y in zip(a.split(64, 1), b.split(64, 0), strict=True)]
    return torch.stack(blocks).sum(0).to(dtype), a @ b, a.double() @ b.double()


def rounded(dtype: torch.dtype, count: int = MILLION) -> tuple[Tensor, Tensor]:
    """Eager's output and the reference: numbers of the dtype, each as exact as it can be."""
    reference = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return reference.to(dtype), reference


@pytest.mark.parametrize("dtype", FLOATS)
def test_another_order_of_summation_is_right(dtype: torch.dtype) -> None:
    judgement = judge(*triple(dtype))
    assert judgement.ok, judgement
    assert judgement.error <= judgement.allowed


@pytest.mark.parametrize("dtype", FLOATS)
def test_computing_in_higher_precision_and_rounding_once_is_right(dtype: torch.dtype) -> None:
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(dtype)
    eager = torch.tanh(torch.exp(x * 0.5) + x)
    reference = torch.tanh(torch.exp(x.double() * 0.5) + x.double())
    assert judge(reference.to(dtype), eager, reference).ok


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_single_wrong_element_in_a_million_fails(dtype: torch.dtype) -> None:
    eager, reference = rounded(dtype)
    assert judge(eager.clone(), eager, reference).ok
    place = int((reference - 0.7).abs().argmin())
    for wrong in (0.0, -0.7, 1.4, 1e4, float("nan"), float("inf")):
        compiled = eager.clone()
        compiled[place] = wrong
        judgement = judge(compiled, eager, reference)
        assert not judgement.ok, wrong
        assert judgement.detail


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_systematic_error_of_one_percent_fails(dtype: torch.dtype) -> None:
    eager, reference = rounded(dtype, 10_000)
    assert not judge((eager.double() * 1.01).to(dtype), eager, reference).ok
    compiled, eager, reference = triple(dtype)
    assert not judge((compiled.double() * 1.01).to(dtype), eager, reference).ok


def test_an_error_that_eager_makes_too_is_allowed_and_more_than_twice_it_is_not() -> None:
    reference = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    noise = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) * 1e-3
    eager = (reference + noise).float()
    assert judge((reference - 1.5 * noise).float(), eager, reference).ok
    assert not judge((reference - 2.5 * noise).float(), eager, reference).ok


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_fails_unless_eager_and_the_reference_have_it_too(dtype: torch.dtype) -> None:
    nan, good = torch.tensor([1.0, float("nan")]).to(dtype), torch.tensor([1.0, 2.0]).to(dtype)
    assert judge(nan, nan, nan.double()).ok
    assert not judge(nan, good, good.double()).ok
    assert not judge(nan, nan, good.double()).ok
    assert not judge(good, nan, nan.double()).ok
    assert not judge(torch.full_like(good, float("nan")), nan, nan.double()).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_rows_that_are_wrong_among_right_ones_are_counted_and_placed(dtype: torch.dtype) -> None:
    compiled, eager, reference = (each.view(4, 16, 96) for each in triple(dtype))
    compiled, size = compiled.clone(), float(reference.abs().max())
    compiled[0, 0, 0] += torch.finfo(dtype).eps * size  # as rounding may
    for row, off in ((1, 3), (2, 7), (3, 1)):
        compiled[row, off] += (4 - row) * size
    judgement = judge(compiled, eager, reference)
    assert not judgement.ok
    assert "without 3 of 64 rows, the worst at [1, 3], it is right" in judgement.detail
    everywhere = judge((compiled.double() * 1.02).to(dtype), eager, reference)
    assert not everywhere.ok and "rms error" in everywhere.detail and "rows" not in everywhere.detail


@pytest.mark.parametrize("dtype", FLOATS)
def test_infinity_must_be_eagers_with_its_sign(dtype: torch.dtype) -> None:
    infinite, good = torch.tensor([1.0, float("inf")]).to(dtype), torch.tensor([1.0, 2.0]).to(dtype)
    assert judge(infinite, infinite, infinite.double()).ok
    assert not judge(infinite, good, good.double()).ok
    assert not judge(-infinite, infinite, infinite.double()).ok
    assert not judge(good, infinite, infinite.double()).ok


def test_what_overflows_in_the_outputs_dtype_and_not_in_float64_is_judged_as_infinite() -> None:
    reference = torch.tensor([1.0, 1e5, torch.finfo(torch.float64).min], dtype=torch.float64)
    eager = torch.tensor([1.0, float("inf"), torch.finfo(torch.float16).min], dtype=torch.float16)
    assert judge(eager, eager, reference).ok
    wrong = eager.clone()
    wrong[0] = 2.0
    assert not judge(wrong, eager, reference).ok


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", FLOAT8)
def test_floats_of_8_bits_are_judged(dtype: torch.dtype) -> None:
    eager, reference = rounded(dtype, 10_000)
    assert judge(eager.clone(), eager, reference).ok
    assert judge(eager.clone(), eager, eager).ok
    assert not judge((eager.float() * 1.25).to(dtype), eager, reference).ok
    wrong = eager.float()
    wrong[int(reference.abs().argmin())] = 100.0
    assert not judge(wrong.to(dtype), eager, reference).ok
    wrong[0] = float("nan")
    assert not judge(wrong.to(dtype), eager, reference).ok


@pytest.mark.parametrize("dtype", FLOAT8)
def test_what_8_bits_have_no_number_for_is_judged_as_what_the_dtype_makes_of_it(dtype: torch.dtype) -> None:
    reference = torch.tensor([1.0, 1e9, -1e9], dtype=torch.float64)
    eager = reference.to(dtype)
    assert judge(eager.clone(), eager, reference).ok
    assert not judge(torch.ones(3).to(dtype), eager, reference).ok


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_outputs_are_judged_with_their_zeros_and_must_be_sparse(layout: torch.layout) -> None:
    dense = torch.randn(8, 6, generator=torch.Generator().manual_seed(6)).relu()
    eager = dense.to_sparse(layout=layout)
    assert judge(dense.to_sparse(layout=layout), eager, eager.double()).ok
    wrong = dense.clone()
    wrong[3] += 0.5
    assert not judge(wrong.to_sparse(layout=layout), eager, eager.double()).ok
    judgement = judge(dense, eager, eager.double())
    assert not judgement.ok and "sparse" in judgement.detail and "strided" in judgement.detail


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_numbers_that_are_not_floating_must_be_eagers_or_the_references(dtype: torch.dtype) -> None:
    eager = torch.tensor([0, 1, 1, 0]).to(dtype)
    reference = torch.tensor([0, 1, 1, 1]).to(dtype)
    assert judge(eager.clone(), eager, reference).ok
    assert judge(reference.clone(), eager, reference).ok
    wrong = torch.tensor([1, 1, 1, 1]).to(dtype)
    assert not judge(wrong, eager, reference).ok


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_judged_by_both_parts_also_where_eager_gives_a_lazy_view(dtype: torch.dtype) -> None:
    reference = torch.randn(1000, dtype=torch.complex128, generator=torch.Generator().manual_seed(5))
    eager = reference.to(dtype)
    assert judge(eager.clone(), eager, reference).ok
    assert judge(eager.conj().resolve_conj(), eager.conj(), reference.conj()).ok
    assert not judge(eager.conj().resolve_conj(), eager, reference).ok
    wrong = eager.clone()
    wrong[0] += 0.5j
    assert not judge(wrong, eager, reference).ok
    wrong, eager, reference = (each.view(50, 20) for each in (wrong, eager, reference))
    assert "without 1 of 50 rows, the worst at [0]" in judge(wrong, eager, reference).detail


def test_another_shape_or_dtype_fails_and_both_are_named() -> None:
    x = torch.ones(2, 3)
    for other, came in ((torch.ones(3, 2), "[3, 2]"), (torch.ones(2, 3, 1), "[2, 3, 1]"), (x.double(), "float64")):
        judgement = judge(other, x, x.double())
        assert not judgement.ok
        assert came in judgement.detail
        assert "[2, 3]" in judgement.detail


def test_empty_0_d_and_all_zero_outputs_are_judged() -> None:
    assert judge(torch.ones(0, 3), torch.ones(0, 3), torch.ones(0, 3).double()).ok
    assert judge(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0).double()).ok
    assert not judge(torch.tensor(1.1), torch.tensor(1.0), torch.tensor(1.0).double()).ok
    zeros = torch.zeros(4)
    assert judge(zeros, zeros, zeros.double()).ok
    assert not judge(zeros + 1e-3, zeros, zeros.double()).ok


def test_a_reference_of_the_outputs_own_dtype_allows_what_assert_close_does() -> None:
    """Where nothing more precise could be run, eager is its own reference and seems to make no error at all."""
    compiled, eager, _ = triple(torch.float32, 64)
    assert judge(compiled, eager, eager).ok
    assert not judge(compiled * 1.001, eager, eager).ok


def test_a_reference_of_another_size_is_left_out() -> None:
    """`x[x > 0]` has as many elements as rounding decides."""
    eager = torch.rand(5, generator=torch.Generator().manual_seed(7))
    assert judge(eager.clone(), eager, torch.rand(6).double()).ok
    assert not judge(eager * 1.01, eager, torch.rand(6).double()).ok
    ids = torch.arange(5)
    assert judge(ids.clone(), ids, torch.arange(6)).ok and not judge(ids + 1, ids, torch.arange(6)).ok
    assert not judge(eager[:4], eager, eager.double()).ok


def test_quantised_tensors_are_judged_by_the_numbers_that_they_stand_for() -> None:
    eager = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.5, 0, torch.qint8)
    assert judge(eager.clone(), eager, eager).ok
    assert not judge(torch.quantize_per_tensor(torch.tensor([0.5, 1.5]), 0.5, 0, torch.qint8), eager, eager).ok


def test_the_floor_is_a_few_units_of_rounding() -> None:
    assert [floor_of(dtype) / torch.finfo(dtype).eps for dtype in FLOATS] == [4, 0.5, 0.5, 4]


def test_inputs_that_require_gradients_are_judged_and_left_alone() -> None:
    x = torch.ones(2, requires_grad=True)
    assert judge(x, x, x.double()).ok
    assert x.grad is None


def test_a_model_that_rounds_to_8_bits_may_be_one_level_off() -> None:
    exact = torch.ones(4)
    near, far = exact + 1 / 300, exact + 1 / 30
    assert not judge(near, exact, exact).ok
    assert judge(near, exact, exact, QUANTISED).ok and not judge(far, exact, exact, QUANTISED).ok


@pytest.mark.parametrize(
    ("call", "rounded"),
    [
        (lambda x: (x * 10).round().to(torch.int8), True),
        (lambda x: x.to(torch.float8_e4m3fn).float(), True),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).int_repr(), True),
        (lambda x: torch.ones(3, dtype=torch.int8).float() * x, False),
        (lambda x: x > 0, False),
    ],
)
def test_only_a_call_that_rounds_values_to_8_bits_has_that_floor(call: Any, rounded: bool) -> None:
    """Weights that are 8 bits already, and masks, do not count as rounding."""
    with RoundingTo8Bits() as watching:  # type: ignore[no-untyped-call]
        call(torch.randn(3))
    assert watching.rounded is rounded


@pytest.mark.every_torch
def test_rounding_within_a_tensor_subclass_is_seen() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    seen = {}
    for name in ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"):
        module = torch.nn.Sequential(torch.nn.Linear(16, 16)).eval()
        torchao.quantize_(module, getattr(torchao, name)())
        with torch.no_grad(), RoundingTo8Bits() as watching:  # type: ignore[no-untyped-call]
            module(torch.randn(4, 16))
        seen[name] = watching.rounded
    assert seen == {"Int8WeightOnlyConfig": False, "Int8DynamicActivationInt8WeightConfig": True}


def test_on_a_cpu_convolutions_keep_the_strict_floor() -> None:
    assert not may_use_tf32(torch.nn.Conv2d(3, 8, 3))
