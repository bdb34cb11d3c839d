"""Convolutions that are made of products and of other convolutions: what `aten.convolution` gives, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from aotc.compiler.codegen.standalone_convolutions import convolution


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of a transposed convolution, or of a dilated one; in one to three axes, with groups, in float64."""
    axes, groups, transposed = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.booleans())
    taken, given = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))

    def each(least: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=axes, max_size=axes))

    sizes, windows, stride, padding = each(1, 9), each(1, 4), each(1, 4), each(0, 3)
    dilation = [1] * axes if transposed else each(1, 4)
    extra = [min(more, step - 1) for more, step in zip(each(0, 3), stride, strict=True)] if transposed else [0] * axes
    channels = (taken, given // groups) if transposed else (given, taken // groups)
    torch.manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(draw(st.integers(1, 3)), taken, *sizes, dtype=torch.float64)
    weight = torch.randn(*channels, *windows, dtype=torch.float64)
    bias = torch.randn(given, dtype=torch.float64) if draw(st.booleans()) else None
    return x, weight, bias, stride, padding, dilation, transposed, extra, groups


@given(calls())
@settings(max_examples=300, deadline=None)
def test_transposed_and_dilated_convolutions_are_torchs(call: tuple[Any, ...]) -> None:
    try:
        expected = torch.ops.aten.convolution(*call)
    except RuntimeError:
        assume(False)
        raise
    result = convolution(*call)
    assume(result is not NotImplemented)
    torch.testing.assert_close(result, expected)
    assert result.is_contiguous()


def test_both_in_one_and_plain_ones_are_left_to_inductor() -> None:
    x, one = torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3)
    rest = [1, 1], [0, 0]
    assert convolution(x, one, None, *rest, [2, 2], True, [0, 0], 1) is NotImplemented
    assert convolution(x, one, None, *rest, [1, 1], False, [0, 0], 1) is NotImplemented


def test_a_convolution_along_one_axis_has_two() -> None:
    layer, x = nn.Conv1d(4, 6, 5, stride=2, padding=1), torch.randn(2, 4, 33)
    found = convolution(x, layer.weight, layer.bias, [2], [1], [1], False, [0], 1)
    torch.testing.assert_close(found, layer(x))


def test_a_vocoder_of_transformers_has_plain_convolutions_alone() -> None:
    transformers = pytest.importorskip("transformers")
    upsampled = {"upsample_initial_channel": 64, "upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8]}
    blocks = {"resblock_kernel_sizes": [3, 7], "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]]}
    torch.manual_seed(0)
    model = transformers.SpeechT5HifiGan(transformers.SpeechT5HifiGanConfig(**upsampled, **blocks)).double().eval()
    x = torch.randn(2, 40, 80, dtype=torch.float64)

    def forms(table: dict[Any, Any]) -> tuple[Any, set[tuple[int, bool]]]:
        """The traced model, and of its convolutions the dilations, and whether they are transposed."""
        graph = make_fx(model, decomposition_table=table)(x)
        nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
        return graph, {(max(node.args[5]), node.args[6]) for node in nodes}

    with torch.no_grad():
        assert forms({})[1] == {(1, False), (3, False), (5, False), (1, True)}
        graph, found = forms({torch.ops.aten.convolution.default: convolution})
        assert found == {(1, False)}
        torch.testing.assert_close(graph(x), model(x))
