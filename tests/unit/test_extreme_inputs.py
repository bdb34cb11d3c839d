"""The second draw: what inputs are filled with where the manifest leaves them free, and what keeps its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aotc.manifest.types import ModelSpec
from aotc.models.extreme_inputs import Draw, Freedom, extreme_leaves, freedoms, freedoms_of_region
from aotc.records import ConstantLeaf, Signature, TensorLeaf

ANY = Freedom("any")


def drawn(leaf: Tensor, free: Freedom = ANY, draw: Draw = "extreme", **options: Any) -> Tensor:
    (found,) = extreme_leaves([leaf], [free], draw, **options)
    assert isinstance(found, Tensor) and (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
    assert found.stride() == leaf.stride()
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_have_rows_of_one_sign_of_nan_of_infinity_and_of_limits(dtype: torch.dtype) -> None:
    x = drawn(torch.randn(10, 33).to(dtype))
    info = torch.finfo(dtype)
    assert (x[0] < 0).all() and (x[1] > 0).all() and x[2].isnan().any() and x[3].isinf().any() and x[4].isfinite().all()
    for row in (2, 3):  # the last one is in the tail of a vector
        assert not x[row, -1].isfinite() and x[row].isfinite().any()
    assert x[4].max() == min(info.max, torch.finfo(torch.float32).max)
    assert ((x[4] != 0) & (x[4].abs() < info.tiny)).any()
    assert {bool(zero.signbit()) for zero in x[4][x[4] == 0]} == {True, False}
    assert torch.equal(x[5:8].isnan(), x[:3].isnan())


def test_few_rows_have_all_of_it_in_the_last_one_and_huge_numbers_one_sign() -> None:
    for leaf in (torch.randn(2, 65), torch.randn(65), torch.randn(1, 65, 1)):
        last = drawn(leaf).reshape(-1, 65)[-1]
        assert last.isnan().any() and last.isposinf().any() and last.isneginf().any()
        huge = last[last.isfinite() & (last.abs() > 1e30)]
        assert len(huge) > 1 and (huge > 0).all()
    assert (drawn(torch.randn(2, 65))[0] < 0).all()


def test_the_edges_are_finite() -> None:
    for leaf in (torch.randn(7, 9), torch.randn(65), torch.randn(2, 3, 4)):
        assert drawn(leaf, draw="edges").isfinite().all() and (drawn(leaf, draw="edges").abs() > 1e30).any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
def test_integers_are_of_one_sign_in_each_row_at_their_limits_and_never_0(dtype: torch.dtype) -> None:
    x = drawn(torch.zeros(2, 65, dtype=dtype))
    info = torch.iinfo(dtype)
    assert (x != 0).all() and x.max() == info.max
    if info.min < 0:
        assert (x[0] < 0).all() and (x[1] > 0).all()
        assert x.min() == info.min + (info.bits > 16)  # `least // -1` ends the process in eager


def test_wide_integers_may_be_left_and_narrow_ones_are_drawn() -> None:
    for dtype, same in ((torch.int64, True), (torch.int32, True), (torch.int8, False)):
        leaf = torch.ones(65, dtype=dtype)
        assert torch.equal(drawn(leaf, wide_integers=False), leaf) is same


@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.int64, 0, 30), (torch.int32, 5, 6), (torch.int64, -3, 4)])
def test_a_randint_keeps_its_limits_and_has_both_ends(dtype: torch.dtype, low: int, high: int) -> None:
    leaf = torch.randint(low, high, (2, 9)).to(dtype)
    x = drawn(leaf, Freedom("both ends", (low, high - 1)))
    assert (x.min(), x.max()) == (low, high - 1)


def test_masks() -> None:
    x = drawn(torch.rand(4, 1, 5) > 0.5)
    assert not x[0].any() and x[1].all()
    assert (
        not drawn(torch.ones(9, dtype=torch.bool)).any() and drawn(torch.ones(9, dtype=torch.bool), draw="edges").all()
    )
    mask = torch.ones(3, 8, dtype=torch.int64)
    assert drawn(mask, Freedom("a masked row")).tolist() == [[1] * 8, [1] * 8, [0] * 8]
    assert drawn(mask[:1], Freedom("a masked row")).tolist() == [[1] * 8]


def test_complex_numbers_8_bit_floats_empty_tensors_and_constants_stay() -> None:
    leaves = [torch.randn(3, dtype=torch.complex64), torch.randn(3).to(torch.float8_e4m3fn), torch.ones(0), 3, None]
    found = extreme_leaves(leaves, [ANY] * 5, "extreme")
    assert torch.equal(found[0], leaves[0]) and torch.equal(found[1].float(), leaves[1].float())
    assert found[2:] == leaves[2:] or (found[2] is leaves[2] and found[3:] == [3, None])


def test_layouts_and_the_wish_for_gradients_stay_and_the_ordinary_leaf_too() -> None:
    leaf = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    before = leaf.detach().clone()
    assert drawn(leaf).requires_grad and torch.equal(leaf, before)
    assert not drawn(leaf)[1].isfinite().all() and drawn(leaf)[0].isfinite().all()


def test_freedom_is_read_from_the_init() -> None:
    inits: dict[str, Any] = {
        "a": None,
        "b": "randn",
        "c": {"randint": [0, 7]},
        "d": "ones",
        "e": "padding",
        "f": {"constant": 2},
        "g": "module:function",
        "h": ["randn", "zeros"],
        "attention_mask": "ones",
    }
    inputs = {name: {"shape": [2], **({"init": init} if init else {})} for name, init in inits.items()}
    spec = ModelSpec(name="net", factory="a:b", inputs={**inputs, "k": 3}, buckets=({},), targets=("native",))
    leaves = [TensorLeaf(name, "float32", (2,)) for name in inits]
    found = freedoms(spec, Signature((), (*leaves, ConstantLeaf("k", 3))))
    free, masked, none = Freedom("any"), Freedom("a masked row"), Freedom("none")
    assert found == [free, free, Freedom("both ends", (0, 6)), none, masked, none, none, free, masked, none]
    region = [torch.randn(2), torch.arange(2), torch.ones(2, dtype=torch.bool), 3]
    assert freedoms_of_region(region) == [free, none, free, none]
