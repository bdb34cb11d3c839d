"""Which differences at extreme values are wrong, and which are another right answer. What is given for compiled code is
what another order, another precision or a folded operator gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from aotc.models.decided_values import first_wrong_value

X = torch.tensor([nan, inf, 1.0, -0.0, 1e38, 1e-40])
HALF = torch.full((2,), 300.0).half()
ONE_INF = torch.tensor([1.0, inf])
HUGE = torch.tensor([3e38, 3e38, -3e38, -3e38])


def wrong(model: Callable[..., Any], leaves: list[Any], given: Any) -> str:
    """What is said of `given`; "" where nothing is."""
    found = first_wrong_value(call(model)(leaves), [given], call(model), leaves)
    return found.said if found else ""


def call(model: Callable[..., Any]) -> Callable[[Any], list[Any]]:
    return lambda leaves: [model(*leaves)]


def sampled(x: Tensor) -> Tensor:
    return torch.nn.functional.grid_sample(torch.ones(1, 1, 2, 2, dtype=x.dtype), x, align_corners=False)


def indices(x: Tensor) -> Tensor:
    found: Tensor = torch.nn.functional.max_pool1d(x, 2, return_indices=True)[1]
    return found


@pytest.mark.parametrize(
    ("model", "leaves", "given", "said"),
    [
        (lambda x: x * 0, [X], torch.zeros(6), "is 0 at [0], nan in eager (2 of 6 elements)"),
        (lambda x: x - x, [X], torch.zeros(6), "is 0 at [0], nan in eager (2 of 6 elements)"),
        (lambda x: x.sum(), [X], torch.tensor(inf), "is inf, nan in eager"),
        (lambda x: x.acosh(), [torch.tensor([4e37])], torch.tensor([inf]), "is inf at [0], 87.2"),
        (lambda x: x.asinh(), [torch.tensor([4e37])], torch.tensor([86.6]), "is 86.5"),
        (lambda x: 1 / x, [X], 1 / (X + 0.0), "is inf at [3], -inf in eager (1 of 6 elements)"),
        (lambda x: x.softmax(-1), [torch.full((2,), -inf)], torch.zeros(2), "(2 of 2 elements)"),
        (lambda x: x.amin(), [torch.arange(2, 11, dtype=torch.int8)], torch.tensor(1, dtype=torch.int8), "is 1, 2 in"),
        (lambda x: x.isnan(), [X], torch.zeros(6, dtype=torch.bool), "is False at [0], True in eager"),
        (lambda x: x @ torch.zeros(6, 2), [X], torch.zeros(2), "is 0 at [0], nan in eager (2 of 2 elements)"),
        (lambda x: torch.var_mean(x)[1], [X[:1]], torch.tensor(0.0), "is 0, nan in eager"),
        (lambda x: x.argmax(), [X], torch.tensor(1), "is 1, 0 in eager"),
        (lambda x: x, [X], X.double(), "is float64[6], float32[6] in eager"),
        (lambda x: x[2].item(), [X], 2.0, "is 2.0, 1.0 in eager"),
        (lambda x: x.half() * 0, [X], torch.zeros(6).half(), "(3 of 6 elements)"),
        (lambda x: torch.complex(x, x), [X], torch.complex(X, X).nan_to_num(), "(2 of 6 elements)"),
    ],
)
def test_what_eager_decides_is_wrong_where_it_differs(
    model: Callable[..., Any], leaves: list[Any], given: Any, said: str
) -> None:
    assert said in wrong(model, leaves, given)
    assert not wrong(model, leaves, call(model)(leaves)[0])


@pytest.mark.parametrize(
    ("reason", "model", "leaves", "given"),
    [
        ("a zero's sign", lambda x: x * 0, [X], -(X * 0)),
        ("what comes of a computed zero's sign", lambda x: 1 / x.relu(), [X], (1 / X.relu()).abs()),
        ("the sign of a computed NaN", lambda x: (x * 0).signbit(), [X[:1]], torch.tensor([True])),
        ("half precision in float32", lambda x: (x * x).sqrt(), [HALF], HALF),
        ("a sum that overflows in another order", lambda x: x.sum(), [HUGE], torch.tensor(nan)),
        ("a product likewise", lambda x: x.prod(), [torch.tensor([1e30, 1e-30] * 2)], torch.tensor(nan)),
        ("sums of products likewise", lambda x: x @ torch.ones(4), [HUGE], torch.tensor(inf)),
        ("a cancelled sum", lambda x: x.sum(), [torch.tensor([1e30, 1.0, -1e30, 2.0])], torch.tensor(0.0)),
        ("a variance that overflows", lambda x: torch.layer_norm(x, (4,)), [HUGE.abs() / 2], torch.full((4,), nan)),
        ("a variance that is infinite", lambda x: x.var(), [HUGE.abs()[:3] / torch.arange(1, 4)], torch.tensor(nan)),
        ("and what comes of it", lambda x: torch.layer_norm(x, (4,), X[5:].expand(4)), [HUGE], HUGE * nan),
        ("a norm that overflows", lambda x: x.norm(), [X[4:]], torch.tensor(1e38)),
        ("a running mean that meets inf", lambda x: torch.var_mean(x)[1], [ONE_INF], torch.tensor(nan)),
        ("another formula of a mixture", lambda x: torch.lerp(x[:1], x[1:], 0.5), [ONE_INF], torch.tensor([nan])),
        ("a large number's sine", lambda x: x.sin(), [X[4:5]], torch.tensor([0.5])),
        ("denormals that are flushed", lambda x: x * 1, [X[5:]], torch.zeros(1)),
        ("and their logarithm", lambda x: x.log(), [X[5:]], torch.tensor([-inf])),
        ("a cast beyond the integer's range", lambda x: x.int(), [X], torch.tensor([5, 6, 1, 0, 7, 0]).int()),
        ("the NaN that a pooling chooses", indices, [torch.full((1, 1, 2), nan)], torch.tensor([[[0]]])),
        ("a coordinate that is NaN", sampled, [torch.full((1, 1, 1, 2), nan)], torch.zeros(1, 1, 1, 1)),
        ("a choice by rounding", lambda x: (x * x).argmax(), [torch.tensor([1.1, 1.1])], torch.tensor(1)),
        ("a size by rounding", lambda x: x[x / 3 * 3 == x], [torch.rand(50)], torch.rand(3)),
    ],
)  # fmt: skip
def test_what_eager_does_not_decide_is_rounding(
    reason: str, model: Callable[..., Any], leaves: list[Any], given: Any
) -> None:
    assert not wrong(model, leaves, given)


def test_where_the_model_does_not_run_in_float64_its_floats_are_not_decided_and_its_integers_are() -> None:
    def model(x: Tensor) -> Tensor:
        if torch.get_default_dtype() == torch.float64:
            raise ValueError("only float32")
        return x * 0

    assert not wrong(model, [X], torch.zeros(6))
    assert wrong(lambda x: model(x).isnan().long(), [X], torch.zeros(6).long())


def test_of_a_model_that_rounds_to_8_bits_only_nan_and_infinities_are_compared() -> None:
    leaves = [torch.tensor([1.0, nan])]

    def of(given: Tensor) -> bool:
        eager = call(lambda x: x)
        return first_wrong_value(eager(leaves), [given], eager, leaves, kinds_only=True) is not None

    assert not of(torch.tensor([1.1, nan])) and of(torch.tensor([1.0, 2.0])) and of(torch.tensor([1.0, nan]).double())


def test_a_module_that_compares_its_input_s_dtype_with_its_weights_is_run_in_float64_all_the_same() -> None:
    module = torch.nn.GRU(2, 3)
    assert wrong(lambda x: module(x)[0], [torch.full((4, 2), nan)], torch.zeros(4, 3)) != ""


def test_the_first_wrong_part_is_named_with_its_path() -> None:
    def model(leaves: Any) -> list[Any]:
        return [leaves[0], {"b": leaves[0] * 0}]

    found = first_wrong_value(model([X]), [X, {"b": torch.zeros(6)}], model, [X])
    assert found is not None and found[:2] == (1, ".b")
    assert first_wrong_value([X], [X, X], model, [X]) is not None


def test_the_rule_imports_no_compiler() -> None:
    code = (
        "import sys, torch; from aotc.models.decided_values import first_wrong_value as f; "
        "f([torch.ones(1)], [torch.zeros(1)], lambda x: [x[0]*1], [torch.ones(1)]); "
        "assert not {'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
