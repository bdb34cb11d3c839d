"""Strides of axes of size 1, which say nothing of where elements lie, and which convolutions look at all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import aotc


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("count", [2, 3, 5], ids=["padded", "exact", "range"])
def test_grey_images_whose_channels_came_last_give_eager_s_outputs(zoo_store: Path, zoo: Any, count: int) -> None:
    module = zoo.Grey().eval()
    compiled = aotc.load("grey", module, store=zoo_store)
    images = torch.randn(count, 8, 8, 1).permute(0, 3, 1, 2)
    assert images.is_contiguous() and images.stride() == (64, 1, 8, 1)
    with torch.no_grad():
        assert close(compiled(images), module(images))


def test_weights_that_were_put_channels_last_do_too(zoo_store: Path, zoo: Any, tmp_path: Path) -> None:
    """The module's own, before and after the load, and those of a file; what is swapped in as well."""
    module, images = zoo.Grey().eval(), torch.randn(5, 1, 8, 8)
    compiled = aotc.load("grey", module, store=zoo_store)
    module.to(memory_format=torch.channels_last)
    assert module.conv.weight.stride() == (9, 1, 3, 1)
    with torch.no_grad():
        for served in (compiled, aotc.load("grey", module, store=zoo_store)):
            assert close(served(images), module(images))
            served.update_weights(module.state_dict())
            assert close(served(images), module(images))
        state = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
        save_file(state, tmp_path / "model.safetensors")
        for weights in (tmp_path / "model.safetensors", module.state_dict()):
            assert close(aotc.load("grey", weights=weights, store=zoo_store)(images), module(images))
