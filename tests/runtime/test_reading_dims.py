"""Dims are read off a call's shapes, whatever the form in which the manifest states them."""

from __future__ import annotations

import pytest
import torch
from hand_built import make_artifact, make_compiled, tensor
from hypothesis import given
from hypothesis import strategies as st

from aotc.call_table.dispatch import DimReader, Dispatcher, shape_of
from aotc.errors import CorruptError, MissError
from aotc.records import ConstantLeaf, PadRule


def read(leaves: list, *shapes: tuple[int, ...]) -> dict[str, int]:
    reader = DimReader(leaves)
    return reader.named(reader.read([torch.empty(shape) for shape in shapes]))


def test_a_dim_that_stands_alone_on_an_axis_is_that_axis() -> None:
    assert read([tensor("x", "batch", "seq", 8)], (2, 5, 8)) == {"batch": 2, "seq": 5}


@given(st.integers(0, 100), st.integers(1, 9), st.integers(-5, 5))
def test_a_dim_that_is_only_derived_from_is_solved_for(seq: int, scale: int, offset: int) -> None:
    leaf = tensor("x", f"{scale}*seq + {offset}" if offset >= 0 else f"{scale}*seq - {-offset}")
    size = scale * seq + offset
    if size >= 0:
        assert read([leaf], (size,)) == {"seq": seq}


def test_an_axis_that_is_the_dim_is_preferred_to_one_that_is_derived_from_it() -> None:
    assert read([tensor("x", "2*seq"), tensor("y", "seq")], (99,), (4,)) == {"seq": 4}


def test_a_size_that_no_whole_dim_explains_is_a_miss_that_says_so() -> None:
    compiled = make_compiled(lambda x: x, [tensor("x", 3, "2*seq", pad={"seq": PadRule()})], [{"seq": 4}])
    assert compiled(torch.ones(3, 8)).shape == (3, 8)
    with pytest.raises(MissError) as caught:
        compiled(torch.ones(3, 7))
    (issue,) = caught.value.issues
    assert (issue.where, issue.expected, issue.actual) == ("x.shape[1]", "2*seq", "7")


def test_a_negative_dim_is_a_miss_though_padding_could_reach_the_bucket() -> None:
    compiled = make_compiled(lambda x: x, [tensor("x", "seq + 3", pad={"seq": PadRule()})], [{"seq": 4}])
    with pytest.raises(MissError, match=r"x.shape\[0\]"):
        compiled(torch.ones(2))


@pytest.mark.parametrize(
    "text", ["seq % 8", "min(seq, 512)", "seq % 1000", "seq // 2", "seq * seq", "max(seq, 9)", "abs(seq - 9)", "-seq"]
)
def test_a_dim_that_cannot_be_solved_for_is_not_read_there(text: str) -> None:
    assert DimReader([tensor("x", text)]).names == ()
    with pytest.raises(CorruptError, match="seq=8"):
        Dispatcher(
            make_artifact([tensor("x", text)]).signature, make_artifact([tensor("x", text)], [{"seq": 8}]).variants
        )


def test_axes_that_repeat_or_derive_a_dim_must_agree_with_it() -> None:
    compiled = make_compiled(
        lambda x, y: x, [tensor("x", "seq", "seq"), tensor("y", "2*seq", "seq+1")], [{"seq": 3}, {"seq": 4}]
    )
    compiled(torch.ones(3, 3), torch.ones(6, 4))
    for x, y in (((3, 4), (6, 4)), ((3, 3), (7, 4)), ((3, 3), (6, 3))):
        with pytest.raises(MissError, match="shape"):
            compiled(torch.ones(x), torch.ones(y))


def test_0_d_tensors_zero_sizes_and_constants_have_their_place() -> None:
    compiled = make_compiled(
        lambda scale, x: scale * x,
        [tensor("scale"), ConstantLeaf("flag", True), tensor("x", "batch", 0)],
        [{"batch": 0}, {"batch": 2}],
    )
    assert compiled(torch.tensor(2.0), True, torch.ones(0, 0)).shape == (0, 0)
    assert compiled(torch.tensor(2.0), True, torch.ones(2, 0)).shape == (2, 0)
    with pytest.raises(MissError, match="scale"):
        compiled(torch.ones(1), True, torch.ones(2, 0))
    with pytest.raises(MissError, match="batch is 1"):
        compiled(torch.tensor(2.0), True, torch.ones(1, 0))


def test_the_shape_that_dims_imply_is_given_back() -> None:
    assert shape_of(tensor("x", 3, "2*seq", "batch+seq", "seq"))({"seq": 5, "batch": 1}) == (3, 10, 6, 5)


def test_an_expression_that_cannot_be_read_is_a_corrupt_record() -> None:
    with pytest.raises(CorruptError, match="os"):
        DimReader([tensor("x", "__import__('os')")])


def test_a_shape_that_divides_by_a_dim_is_a_miss_at_zero_and_no_crash() -> None:
    compiled = make_compiled(
        lambda x, y: x, [tensor("x", "seq"), tensor("y", "64 // seq", pad={"seq": PadRule()})], [{"seq": 8}]
    )
    with pytest.raises(MissError):
        compiled(torch.ones(0), torch.ones(8))
