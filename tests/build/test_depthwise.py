"""Depthwise convolutions: where the template takes part in a race, and when cuDNN's wins it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.kernel import conv
from torch._inductor.virtualized import V

from aotc.build.autotuning import depthwise, operators
from aotc.build.autotuning.depthwise import BLOCKS, depthwise_template_raced, is_depthwise
from aotc.picks import Candidate, Pick

WINDOW = dict.fromkeys(depthwise._WINDOW, 3)


@pytest.fixture(autouse=True)
def graph() -> Iterator[None]:
    """Inductor's, in which nodes have sizes."""
    with V.set_graph_handler(GraphLowering(torch.fx.symbolic_trace(torch.nn.Identity()))):
        yield


def node(name: str, size: Sequence[int], channels_last: bool = True) -> ir.Buffer:
    _, c, h, w = size
    stride = [c * h * w, 1, c * w, c] if channels_last else [c * h * w, h * w, w, 1]
    layout = ir.FixedLayout(torch.device("cpu"), torch.float32, [*size], stride)
    return ir.InputBuffer(name=name, layout=layout)


IMAGE, WEIGHT = (1, 32, 8, 8), (32, 1, 3, 3)


@pytest.mark.parametrize(
    ("image", "weight", "groups", "channels_last", "is_one"),
    [
        (IMAGE, WEIGHT, 32, True, True),
        (IMAGE, WEIGHT, 32, False, False),  # torch has a kernel of its own
        (IMAGE, (32, 32, 3, 3), 1, True, False),
        (IMAGE, (32, 8, 3, 3), 4, True, False),
        (IMAGE, (64, 1, 3, 3), 32, True, False),
        ((1, 1, 8, 8), (1, 1, 3, 3), 1, True, False),
    ],
)
def test_which_convolutions_are_depthwise(
    image: Sequence[int], weight: Sequence[int], groups: int, channels_last: bool, is_one: bool
) -> None:
    assert is_depthwise([node("image", image, channels_last), node("weight", weight)], groups) is is_one


class Offered:
    """Stands for a template: what it is asked to offer."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, list[dict[str, Any]]()

    def maybe_append_choice(self, choices: list[Any], **kwargs: Any) -> None:
        self.asked.append(kwargs)
        choices.append(self)


@pytest.mark.parametrize(("groups", "weight"), [(32, WEIGHT), (1, (32, 32, 3, 3))])
def test_the_template_takes_inductor_s_place_in_the_race(
    monkeypatch: pytest.MonkeyPatch, groups: int, weight: Sequence[int]
) -> None:
    own, inductors = Offered("triton_depthwise_conv2d_7"), Offered("triton_convolution2d_1")
    monkeypatch.setattr(depthwise, "_template", lambda: own)
    monkeypatch.setattr(conv.conv2d_template, "maybe_append_choice", inductors.maybe_append_choice)
    choices: list[Any] = []
    inputs = [node("image", IMAGE), node("weight", weight)]
    with depthwise_template_raced():
        for warps in (1, 2, 4):
            conv.conv2d_template.maybe_append_choice(
                choices, input_nodes=inputs, layout=None, GROUPS=groups, UNROLL=False, num_warps=warps, **WINDOW
            )
    if groups == 1:
        assert not own.asked and [one["num_warps"] for one in inductors.asked] == [1, 2, 4]
    else:
        assert not inductors.asked and [one["RUN"] for one in own.asked] == [block.run for block in BLOCKS]


def library_call(groups: int, inputs: Sequence[ir.Buffer]) -> Any:
    sides = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "output_padding": (0, 0)}
    arguments = {**sides, "transposed": False, "groups": groups, "bias": None}
    return conv.aten_convolution.bind([*inputs], inputs[0].get_layout(), [*arguments], **arguments)


@pytest.mark.parametrize(
    ("groups", "library_ms", "winner"),
    [(32, 0.8, "template"), (32, 0.7, "library"), (32, 1.1, "template"), (1, 0.8, "library")],
)
def test_cudnn_s_must_save_a_quarter_where_it_is_compiled_at_run_time(
    groups: int, library_ms: float, winner: str
) -> None:
    inputs = [node("image", IMAGE), node("weight", WEIGHT if groups == 32 else (32, 32, 3, 3))]
    library, template = library_call(groups, inputs), "template"
    times = {library: library_ms, template: 1.0, "another": 1.5}
    left = operators._without_what_is_compiled_at_run_time(inputs, times)
    assert min(left, key=left.__getitem__) is (library if winner == "library" else template)
    alone = {library: 0.8}
    assert operators._without_what_is_compiled_at_run_time(inputs, alone) == alone


def test_what_was_decided_is_decided_again_though_another_was_faster() -> None:
    """Inductor takes the least of the times that a pin or another unit answers with."""
    candidates = tuple(Candidate(name, ms=ms) for name, ms in (("library", 0.8), ("template", 1.0), ("other", 1.2)))
    pick = Pick(kind="operator", subject="convolution", candidates=candidates, chosen=1)
    times = operators._times(pick, [(candidate, candidate.name) for candidate in candidates])
    assert min(times, key=times.__getitem__) == "template" and times == {"template": 1.0, "other": 1.2}
