"""Outputs that are cut back where a call was padded share memory as eager's do."""

from __future__ import annotations

import torch
from drawn_views import drawn_part, drawn_tensor, drawn_view
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aotc.call_table.dispatch import Crop
from aotc.runtime.padding.padded_tensors import apply_crops


def cut_back(outputs: list[Tensor], *crops: tuple[int, int, int]) -> list[Tensor]:
    """By output, axis and size."""
    apply_crops(outputs, [Crop(*crop) for crop in crops])
    return outputs


def test_a_row_and_a_transposed_tensor_are_views_of_the_copy_as_in_eager() -> None:
    padded = torch.arange(4 * 5 * 8.0).reshape(4, 5, 8)
    whole, first, turned, flat = cut_back(
        [padded, padded[:, 0], padded.transpose(0, 1), padded.view(20, 8)], (0, 0, 3), (1, 0, 3), (2, 1, 3), (3, 0, 15)
    )
    expected = padded[:3].clone()
    assert torch.equal(whole, expected) and whole.is_contiguous()
    assert first.data_ptr() == turned.data_ptr() == flat.data_ptr() == whole.data_ptr() != padded.data_ptr()
    whole += 1
    for one, other in ((first, expected[:, 0]), (turned, expected.transpose(0, 1)), (flat, expected.view(15, 8))):
        assert torch.equal(one, other + 1) and one.stride() == other.stride()


def test_what_no_other_output_holds_has_memory_of_its_own() -> None:
    padded = torch.arange(40.0).reshape(8, 5)
    left, right = cut_back([padded[:5], padded[3:]], (0, 0, 4), (1, 0, 4))
    assert torch.equal(left, padded[:4]) and torch.equal(right, padded[3:7])
    left += 100
    assert torch.equal(right, padded[3:7])


def test_an_output_that_needs_a_pad_of_the_other_is_a_copy() -> None:
    padded = torch.arange(40.0).reshape(8, 5)
    whole, last = cut_back([padded, padded[6:]], (0, 0, 4))
    assert torch.equal(whole, padded[:4]) and torch.equal(last, padded[6:])


def test_rows_that_run_over_a_cut_axis_are_a_copy() -> None:
    """Of the flattened tensor the first ten rows are not those of the two that are left of each five."""
    padded = torch.arange(4 * 5 * 8.0).reshape(4, 5, 8)
    whole, flat = cut_back([padded, padded.view(20, 8)], (0, 1, 2), (1, 0, 10))
    assert torch.equal(whole, padded[:, :2]) and torch.equal(flat, padded.view(20, 8)[:10])


def test_results_that_autograd_follows_are_copied_one_by_one() -> None:
    padded = torch.ones(4, 5, requires_grad=True) * 2
    whole, apart = cut_back([padded, padded.detach()], (0, 0, 3), (1, 0, 3))
    assert whole.requires_grad and not apart.requires_grad and whole.data_ptr() != apart.data_ptr()


def test_an_uncut_output_keeps_the_views_of_it() -> None:
    cache = torch.arange(32.0).reshape(8, 4)
    whole, rows = cut_back([cache, cache[:6]], (1, 0, 3))
    assert whole is cache and rows.data_ptr() == cache.data_ptr() and torch.equal(rows, cache[:3])


def test_a_view_of_which_nothing_is_left_is_empty() -> None:
    padded = torch.arange(40.0).reshape(8, 5)
    whole, rows = cut_back([padded, padded[2:]], (0, 0, 4), (1, 0, 0))
    assert torch.equal(whole, padded[:4]) and rows.shape == (0, 5)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_drawn_view_of_what_is_left_has_its_values_in_the_copy(data: st.DataObject) -> None:
    padded = drawn_tensor(data, data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    left = drawn_part(data, padded)
    view = drawn_view(data, left)
    expected = view.clone()
    whole, moved = cut_back([padded, view], *((0, axis, size) for axis, size in enumerate(left.shape)))
    assert torch.equal(moved, expected)
    whole += 1000
    assert torch.equal(moved, expected + 1000)
