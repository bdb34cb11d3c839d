"""What is asked about a convolution leaves the range of its batch as it is, in each of the ways that torch asks it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aotc.compiler.patches import convolutions_of_a_range


@pytest.mark.parametrize("named", [False, True], ids=["by position", "by name"])
def test_a_question_about_a_batch_of_16_sets_no_guard(named: bool) -> None:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])  # type: ignore[no-untyped-call]
    images = mode.from_tensor(torch.randn(16, 4, 8, 8), symbolic_context=context)
    weight = mode.from_tensor(torch.randn(4, 4, 3, 3))
    given: dict[str, Any] = {"input": images, "weight": weight}
    rest: dict[str, Any] = {
        "bias": None,
        "stride": [1, 1],
        "padding": [1, 1],
        "dilation": [1, 1],
        "transposed": False,
        "output_padding": [0, 0],
        "groups": 1,
        "bias_sizes": None,
    }
    with mode, convolutions_of_a_range.apply():
        if named:
            torch._C._select_conv_backend(**given, **rest)
        else:
            torch._C._select_conv_backend(images, weight, **rest)
    assert not environment.guards
