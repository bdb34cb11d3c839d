"""Inputs grow to the bucket's sizes by their rules; outputs are cut back to the request's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hand_built import make_compiled, tensor
from hypothesis import given
from hypothesis import strategies as st

from aotc.call_table.dispatch import Pad
from aotc.records import Output, PadRule
from aotc.runtime.padding.padded_tensors import apply_pad

EDGE = PadRule(edge=True)


def ran_with(compiled: Any) -> torch.Tensor:
    """The first argument that the library got last."""
    (library,) = compiled.libraries
    return library.seen[-1][0]


def padded(x: torch.Tensor, rule: PadRule, size: int = 4, **leaf: Any) -> torch.Tensor:
    dtype = str(x.dtype).removeprefix("torch.")
    compiled = make_compiled(
        lambda x: x, [tensor("x", "n", *x.shape[1:], dtype=dtype, pad={"n": rule}, **leaf)], [{"n": size}]
    )
    compiled(x)
    return ran_with(compiled)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, -1.5),
        (torch.bfloat16, 2.0),
        (torch.float16, 0),
        (torch.float64, 1e300),
        (torch.int64, 50256),
        (torch.int32, -1),
        (torch.uint8, 255),
        (torch.bool, True),
        (torch.bool, False),
        (torch.complex64, 1.0),
    ],
)
def test_a_value_fills_what_is_missing_and_the_dtype_stays(dtype: torch.dtype, value: Any) -> None:
    result = padded(torch.ones(2, dtype=dtype), PadRule(value=value))
    assert result.dtype == dtype
    assert result.tolist() == [*torch.ones(2, dtype=dtype).tolist(), *torch.full((2,), value, dtype=dtype).tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_edge_repeats_the_last_slice(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    assert padded(x, EDGE).tolist() == torch.stack([x[0], x[1], x[1], x[1]]).tolist()


def test_an_empty_axis_has_no_edge_and_is_filled_with_zeros() -> None:
    assert padded(torch.ones(0, 2), EDGE, size=2).tolist() == [[0, 0], [0, 0]]


def test_a_batch_of_zero_is_padded_and_cut_back_to_zero() -> None:
    compiled = make_compiled(
        lambda x: x + 1,
        [tensor("x", "batch", 3, pad={"batch": PadRule()})],
        [{"batch": 4}],
        outputs=(Output(index=0, dims=("batch", "")),),
    )
    assert compiled(torch.ones(0, 3)).shape == (0, 3)
    assert ran_with(compiled).shape == (4, 3)


def test_each_dim_and_each_input_has_a_rule_of_its_own_and_derived_sizes_follow() -> None:
    compiled = make_compiled(
        lambda x, y: x,
        [
            tensor("x", "batch", "seq", pad={"batch": PadRule(value=9), "seq": EDGE}),
            tensor("y", "2*seq", pad={"seq": PadRule(value=-1)}),
        ],
        [{"batch": 2, "seq": 3}],
    )
    compiled(torch.tensor([[1.0, 2.0]]), torch.zeros(4))
    (library,) = compiled.libraries
    x, y = library.seen[-1]
    assert x.tolist() == [[1, 2, 2], [9, 9, 9]]
    assert y.tolist() == [0, 0, 0, 0, -1, -1]


def test_the_callers_tensor_is_not_touched() -> None:
    x = torch.ones(2)
    assert padded(x, PadRule(value=5)).tolist() == [1, 1, 5, 5]
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize("rule", [PadRule(value=0), EDGE])
@pytest.mark.parametrize(
    ("layout", "form", "shape"),
    [
        ("channels_last", torch.channels_last, (2, 3, 4, 5)),
        ("channels_last", torch.channels_last, (1, 3, 1, 1)),
        ("channels_last", torch.channels_last, (3, 1, 4, 4)),
        ("channels_last_3d", torch.channels_last_3d, (2, 3, 2, 4, 5)),
        ("contiguous", torch.contiguous_format, (2, 8, 1, 1)),
    ],
)
def test_what_was_padded_lies_in_the_compiled_layout(rule: PadRule, layout: str, form: Any, shape: Any) -> None:
    """Compiled code checks no strides: a padded input in another layout would be a wrong answer in silence."""
    x = torch.randn(shape).contiguous(memory_format=form)
    result = padded(x, rule, layout=layout)
    assert result.is_contiguous(memory_format=form)
    assert torch.equal(result[: shape[0]], x)


@pytest.mark.parametrize("rule", [PadRule(value=0), EDGE])
@pytest.mark.parametrize("axis", range(4))
def test_any_axis_of_a_channels_last_tensor_may_grow(axis: int, rule: PadRule) -> None:
    x = torch.randn(2, 3, 1, 4).contiguous(memory_format=torch.channels_last)
    grown = apply_pad(x, Pad(0, axis, 6, rule, "channels_last"))
    assert grown.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(grown.narrow(axis, 0, x.shape[axis]), x)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.data())
def test_padding_then_cutting_gives_back_the_request(shape: list[int], data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    grow = data.draw(st.integers(1, 3))
    rule = data.draw(st.sampled_from([EDGE, PadRule(value=3)]))
    x = torch.randn(shape)
    grown = apply_pad(x, Pad(0, axis, shape[axis] + grow, rule))
    assert torch.equal(grown.narrow(axis, 0, shape[axis]), x)
    added = grown.narrow(axis, shape[axis], grow)
    if rule.edge and shape[axis]:
        assert torch.equal(added, x.narrow(axis, -1, 1).expand_as(added))
    else:
        assert bool((added == (0 if rule.edge else 3)).all())


def test_every_named_axis_of_every_output_is_cut_derived_ones_too_and_others_stay() -> None:
    compiled = make_compiled(
        lambda x: (x, torch.cat([x, x], 1), x.sum(1)),
        [tensor("x", "batch", "seq", pad={"batch": PadRule(), "seq": PadRule()})],
        [{"batch": 4, "seq": 8}],
        outputs=(
            Output(index=0, dims=("batch", "seq")),
            Output(index=1, dims=("", "2*seq+-1")),
            Output(index=2),
        ),
        output_sample=(0, 0, 0),
    )
    first, second, third = compiled(torch.ones(3, 5))
    assert (first.shape, second.shape, third.shape) == ((3, 5), (4, 9), (4,))
    assert torch.equal(first, torch.ones(3, 5))


def test_an_exact_request_is_neither_padded_nor_cut() -> None:
    compiled = make_compiled(
        lambda x: x,
        [tensor("x", "seq", pad={"seq": PadRule()})],
        [{"seq": 4}],
        outputs=(Output(index=0, dims=("seq",)),),
    )
    x = torch.ones(4)
    assert compiled(x) is x
    assert ran_with(compiled) is x


def test_what_the_model_writes_to_a_padded_input_is_written_to_the_callers_tensor() -> None:
    compiled = make_compiled(
        lambda x: x.add_(1).sum(),
        [tensor("x", "batch", "seq", pad={"batch": PadRule(), "seq": PadRule()})],
        [{"batch": 4, "seq": 8}],
        mutated_leaves=(0,),
    )
    x = torch.zeros(2, 3)
    compiled(x)
    assert x.tolist() == [[1, 1, 1], [1, 1, 1]]
