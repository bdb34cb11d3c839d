"""What counts as another result, and what as rounding or chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotc.tensors.rounding import REPEATED, difference, first_difference, is_repeated, rounded_otherwise, said_of


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_row_of_others(x: Tensor) -> Tensor:
    return torch.cat([x[:-1], drawn(1, x.shape[1], seed=1)])


def one_is_nan(x: Tensor) -> Tensor:
    return x.masked_fill(torch.arange(x.numel()).view_as(x) == 5, torch.nan)


X = drawn(1000, 64)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (drawn(1, 1000).softmax(-1), drawn(1, 1000, seed=1).softmax(-1)),
        (drawn(4, 30000).softmax(-1), drawn(4, 30000, seed=1).softmax(-1)),
        (X * 1e-4, X * 1.1e-4),
        (X, one_row_of_others(X)),
        (X, one_is_nan(X)),
        (X, X.t().contiguous().view(1000, 64)),
        (X > 0, X > 0.2),
        (torch.arange(10), torch.arange(10) + 1),
        (X, X.double()),
        (X, X[:1]),
        (torch.complex(X, X), torch.complex(X, -X)),
        (3, 4),
        (3, 3.0),
        (None, 0),
        (torch.zeros(3), torch.full((3,), 1e-3)),
    ],
)
def test_another_result_is_told_by_its_size(first: Any, other: Any) -> None:
    assert difference(first, other) > 1
    assert first_difference([first], [other], lambda seed: [first]) == 0


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (X, X.bfloat16().float()),
        (X.half(), (X * 1.001).half()),
        (torch.zeros(3), torch.full((3,), 1e-8)),
        (X.new_tensor([torch.nan, torch.inf, 1.0]), X.new_tensor([torch.nan, torch.inf, 1.0])),
        (X.new_zeros(0, 3), X.new_zeros(0, 3)),
        ("text", "text"),
    ],
)
def test_rounding_is_no_difference(first: Any, other: Any) -> None:
    assert difference(first, other) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deep_model_that_computes_in_more_digits_gives_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model, x = nn.Sequential(*layers).to(dtype), drawn(16, 64).to(dtype)
    with torch.no_grad():
        exact = nn.Sequential(*(layer.double() for layer in model))(x.double()).to(dtype)
        model.to(dtype)
        assert first_difference([model(x)], [exact], lambda seed: [model(x)]) is None


def routed(x: Tensor) -> Tensor:
    """Each row by the sign of a sum that rounding decides."""
    balanced = torch.cat([x, -x.roll(1, 1)], 1).sum(1, keepdim=True)
    return torch.where(balanced > 0, x + 3, x * 5)


def cancelled(x: Tensor) -> Tensor:
    return (x * 1000 + 1e4).sum(0) - (x * 1000).sum(0) - 1e4 * x.shape[0]


def by_chance(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape[1]) * 3


@pytest.mark.parametrize("model", [routed, cancelled, by_chance])
def test_where_rounding_or_chance_decides_nothing_is_said(model: Callable[[Tensor], Tensor]) -> None:
    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [model(X)]

    (first,) = run(0)
    torch.manual_seed(100)
    other = by_chance(X) if model is by_chance else model(X.double()).float()
    assert difference(first, other) > 1
    assert first_difference([first], [other], run) is None
    if model is not by_chance:
        assert first_difference([first, X], [other, X * 2], lambda seed: [*run(seed), X]) == 1


def test_a_model_that_cannot_be_rounded_otherwise_is_run_as_it_is() -> None:
    def run(seed: int) -> list[Tensor]:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("not with a mode")
        return [X]

    assert first_difference([X], [-X], run) == 0
    assert first_difference([X], [X.half().float()], run) is None


def test_flex_attention_is_rounded_otherwise_and_can_be_called_after_it() -> None:
    """In eager it goes through Dynamo, which takes no dispatch mode, and nothing of that kind after one."""
    from torch.nn.attention.flex_attention import flex_attention

    query = drawn(1, 2, 16, 16)

    def run(seed: int) -> list[Tensor]:
        return [flex_attention(query * 2, query, query)]

    (first,), (again,) = run(0), rounded_otherwise(run, 1)
    assert not torch.equal(first, again)
    torch.testing.assert_close(again, first)
    torch.testing.assert_close(run(0)[0], first)


class Cache:
    """An object that says nothing of equality."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


@pytest.mark.parametrize(
    ("again", "same"),
    [
        (X * (1 + 1e-6), True),
        (X * (1 + 1e-3), False),  # which another program may give
        (one_is_nan(X), False),
        (torch.zeros_like(X), False),
    ],
)
def test_the_same_program_gives_the_same_but_for_the_order_of_sums(again: Tensor, same: bool) -> None:
    assert is_repeated([X, Cache(X)], [again, Cache(again)]) is same
    assert not is_repeated([X], [X, X]) and not is_repeated([torch.zeros(3)], [torch.full((3,), 1e-12)])
    assert not is_repeated([X > 0], [again > 1]) and difference(X[0], X[0].bfloat16(), REPEATED) > 1


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        (torch.nan, 1.0, "has nan in the model and numbers in the compiled code"),
        (1.0, torch.nan, "has numbers in the model and nan in the compiled code"),
        (1.0, 2.0, "differs by 20 × the tolerance for rounding"),
    ],
)
def test_a_difference_is_told_with_what_only_one_has(first: float, other: float, said: str) -> None:
    """The tolerance of a tensor of ones is 0.05 in its root mean square."""
    assert said_of([torch.full((4,), first)], [torch.full((4,), other)]) == said


@pytest.mark.parametrize("seed", range(8))
def test_a_token_is_another_one_by_rounding_alone_where_two_are_as_likely(seed: int) -> None:
    """Products in bfloat16 have few digits: the two largest of many are often one number apart, or equal."""
    x, weight = drawn(1, 64, seed=seed).bfloat16(), drawn(64, 4000, seed=100 + seed).bfloat16()
    best, second, *_ = (x @ weight)[0].topk(8).indices.tolist()
    weight[:, second] = weight[:, best]  # equal, so that eager takes the first of both
    tokens = sorted((best, second))

    def run(_: int) -> list[Tensor]:
        return [(x @ weight).argmax(-1)]

    assert first_difference(run(0), [torch.tensor(tokens[1:])], run) is None
    weight[:, best] *= 2
    assert first_difference(run(0), [torch.tensor([second])], run) == 0
