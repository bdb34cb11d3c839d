"""The strides of a layout are those of a new tensor in it, on axes of size 1, too."""

from __future__ import annotations

import itertools

import pytest
import torch

from aotc.tensors.layouts import MEMORY_FORMATS, laid_out
from aotc.tensors.strides import strides_in


@pytest.mark.parametrize(("layout", "rank"), [*(("contiguous", rank) for rank in range(6)), ("channels_last", 4)])
def test_strides_are_torch_s(layout: str, rank: int) -> None:
    for shape in itertools.product((1, 2, 3), repeat=rank):
        assert strides_in(layout, shape) == torch.empty(shape, memory_format=MEMORY_FORMATS[layout]).stride()


def test_strides_of_volumes_are_torch_s() -> None:
    for shape in itertools.product((1, 2), repeat=5):
        made = torch.empty(shape, memory_format=torch.channels_last_3d)
        assert strides_in("channels_last_3d", shape) == made.stride()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 3, 1, 1), (1, 1, 1, 1), (2, 3, 4, 1), (0, 1, 4, 4)])
def test_a_tensor_is_laid_out_whatever_its_strides_said(layout: str, shape: tuple[int, ...]) -> None:
    for made in MEMORY_FORMATS.values():
        if made is torch.channels_last_3d:
            continue
        tensor = torch.randn(shape).to(memory_format=made)
        odd = tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        for given in (tensor, odd):
            assert laid_out(given, layout).stride() == strides_in(layout, shape)
            assert torch.equal(laid_out(given, layout), tensor)


def test_what_lies_so_already_is_no_copy() -> None:
    grey = torch.randn(2, 4, 4, 1).permute(0, 3, 1, 2)
    assert grey.is_contiguous() and grey.stride() != strides_in("contiguous", grey.shape)
    assert laid_out(grey, "contiguous").data_ptr() == grey.data_ptr()
    plain = torch.randn(2, 3)
    assert laid_out(plain, "contiguous") is plain
