"""Depthwise convolutions: where the template takes part in a race, and when cuDNN's wins it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
import pytest
import sympy
import torch
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.kernel import conv
from torch._inductor.virtualized import V

from aotc.compiler.autotune import algorithm_selection
from aotc.compiler.patches import depthwise_template
from aotc.compiler.patches.depthwise_template import BLOCKS
from aotc.compiler.patches.shared.convolutions import is_depthwise
from aotc.picks import Candidate, Pick

WINDOW = dict.fromkeys(depthwise_template._WINDOW, 3)


@pytest.fixture(autouse=True)
def graph() -> Iterator[None]:
    """Inductor's, in which nodes have sizes."""
    with V.set_graph_handler(GraphLowering(torch.fx.symbolic_trace(torch.nn.Identity()))):
        yield


def node(name: str, size: Sequence[Any], channels_last: bool = True, device: str = "cuda") -> ir.Buffer:
    _, c, h, w = size
    stride = [c * h * w, 1, c * w, c] if channels_last else [c * h * w, h * w, w, 1]
    layout = ir.FixedLayout(torch.device(device), torch.float32, [*size], stride)
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


@pytest.mark.parametrize(
    ("groups", "weight", "width", "runs"),
    [
        (32, WEIGHT, 3, {1, 2, 4, 7}),
        (32, WEIGHT, 31, {1, 2, 4}),
        (32, WEIGHT, 511, set()),
        (1, (32, 32, 3, 3), 3, set()),
    ],
)
def test_the_template_takes_inductor_s_place_in_the_race(
    monkeypatch: pytest.MonkeyPatch, groups: int, weight: Sequence[int], width: int, runs: set[int]
) -> None:
    own, inductors = Offered("triton_depthwise_conv2d_7"), Offered("triton_convolution2d_1")
    monkeypatch.setattr(depthwise_template, "_template", lambda: own)
    monkeypatch.setattr(conv.conv2d_template, "maybe_append_choice", inductors.maybe_append_choice)
    choices: list[Any] = []
    inputs = [node("image", IMAGE), node("weight", weight)]
    window = WINDOW | {"KERNEL_W": width}
    with depthwise_template.apply():
        for warps in (1, 2, 4):
            conv.conv2d_template.maybe_append_choice(
                choices, input_nodes=inputs, layout=None, GROUPS=groups, UNROLL=False, num_warps=warps, **window
            )
    assert [one["num_warps"] for one in inductors.asked] == ([] if runs else [1, 2, 4])
    assert {one["RUN"] for one in own.asked} == runs
    assert len(own.asked) == sum(block.run in runs for block in BLOCKS)  # though it was asked three times


def library_call(groups: int, inputs: Sequence[ir.Buffer]) -> Any:
    sides = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "output_padding": (0, 0)}
    arguments = {**sides, "transposed": False, "groups": groups, "bias": None}
    return conv.aten_convolution.bind([*inputs], inputs[0].get_layout(), [*arguments], **arguments)


@pytest.mark.parametrize(
    ("groups", "any_size", "library_ms", "winner"),
    [
        (32, False, 0.8, "template"),
        (32, False, 0.7, "library"),
        (32, False, 1.1, "template"),
        (32, True, 0.7, "template"),
        (1, False, 0.8, "library"),
        (1, True, 0.8, "library"),
    ],
)
def test_cudnn_s_must_save_a_quarter_where_it_is_compiled_at_run_time_and_sizes_are_fixed(
    groups: int, any_size: bool, library_ms: float, winner: str
) -> None:
    batch = sympy.Symbol("s0", integer=True, positive=True) if any_size else 1
    inputs = [node("image", (batch, *IMAGE[1:])), node("weight", WEIGHT if groups == 32 else (32, 32, 3, 3))]
    library, template = library_call(groups, inputs), "template"
    times = {library: library_ms, "failed": math.inf, template: 1.0, "another": 1.5}
    chosen = algorithm_selection._winner(inputs, times)
    assert chosen is (library if winner == "library" else template)
    told = algorithm_selection._won_by(chosen, times)  # Inductor takes the least of these
    assert min(told, key=told.__getitem__) is chosen and told.keys() == times.keys()
    assert algorithm_selection._winner(inputs, {library: 0.8, "failed": math.inf}) is library


def test_on_a_cpu_nothing_is_compiled_at_run_time() -> None:
    inputs = [node("image", IMAGE, device="cpu"), node("weight", WEIGHT, device="cpu")]
    library = library_call(32, inputs)
    assert algorithm_selection._winner(inputs, {library: 0.9, "template": 1.0}) is library


def test_a_race_of_one_tensor_has_a_winner() -> None:
    inputs = [node("image", IMAGE)]
    assert algorithm_selection._winner(inputs, {library_call(32, inputs): 0.8, "template": 1.0}) != "template"


def test_what_was_decided_is_decided_again_though_another_was_faster() -> None:
    """Inductor takes the least of the times that a pin or another unit answers with."""
    candidates = tuple(Candidate(name, ms=ms) for name, ms in (("library", 0.8), ("template", 1.0), ("other", 1.2)))
    pick = Pick(kind="operator", subject="convolution", candidates=candidates, chosen=1)
    times = algorithm_selection._times(pick, [(candidate, candidate.name) for candidate in candidates])
    assert min(times, key=times.__getitem__) == "template" and times == {"template": 1.0, "library": 1.0, "other": 1.2}


class Language:
    """As much of `triton.language` as the template uses, on tensors, with addresses that are indices of `memory`."""

    float32 = torch.float64
    cdiv = staticmethod(lambda a, b: -(-a // b))
    arange = staticmethod(torch.arange)
    static_range = range

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.program = memory, (0, 0)

    def program_id(self, axis: int) -> torch.Tensor:
        return torch.tensor(self.program[axis])

    def zeros(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def load(self, address: torch.Tensor, mask: torch.Tensor, other: float) -> torch.Tensor:
        address, mask = torch.broadcast_tensors(address, mask)
        return torch.where(mask, self.memory[torch.where(mask, address, 0)], other)


@pytest.mark.parametrize("block", sorted({(block.run, block.runs, block.channels) for block in BLOCKS}))
@pytest.mark.parametrize(
    ("image", "kernel", "stride", "padding"),
    [
        ((2, 5, 7, 9), (3, 3), (1, 1), (1, 1)),
        ((1, 33, 5, 5), (3, 3), (2, 2), (1, 1)),
        ((2, 3, 6, 11), (1, 5), (1, 3), (0, 2)),
        ((1, 70, 4, 4), (4, 4), (4, 4), (0, 0)),
        ((3, 2, 1, 1), (3, 3), (1, 1), (1, 1)),
        ((1, 4, 8, 13), (3, 2), (3, 5), (1, 1)),  # strides beyond the window
        ((2, 2, 10, 15), (7, 7), (1, 1), (3, 3)),
    ],
)
def test_the_template_gives_each_result_once(
    image: tuple[int, ...],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    block: tuple[int, int, int],
) -> None:
    n, c, height, width = image
    x, w = torch.randn(image, dtype=torch.float64), torch.randn(c, 1, *kernel, dtype=torch.float64)
    expected = torch.nn.functional.conv2d(x, w, stride=stride, padding=padding, groups=c)
    memory = torch.cat([x.permute(0, 2, 3, 1).flatten(), w.flatten()])
    sizes = {"X": image, None: tuple(expected.shape)}
    strides = {"X": (height * width * c, 1, width * c, c), "W": w.stride()}
    window = dict(zip(depthwise_template._WINDOW, (*kernel, *stride, *padding), strict=True))
    options = {**window, **dict(zip(("RUN", "BLOCK_R", "BLOCK_C"), block, strict=True))}
    code = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(depthwise_template.SOURCE.read_text())
    text = code.render(
        def_kernel=lambda *names: f"def kernel({', '.join(names)}):",
        size=lambda name, dim: sizes[name][dim],
        stride=lambda name, dim: strides[name][dim],
        store_output=lambda indices, value, mask, **_: f"store({', '.join(indices)}, {value}, {mask})",
        **options,
    )
    given, stored = torch.full_like(expected, math.nan), torch.zeros(expected.shape, dtype=torch.int64)

    def store(*values: torch.Tensor) -> None:
        *indices, value, mask = torch.broadcast_tensors(*values)
        at = tuple(index[mask] for index in indices)
        given[at] = value[mask]
        stored.index_put_(at, torch.tensor(1), accumulate=True)

    language = Language(memory)
    names: dict[str, Any] = {"tl": language, "store": store, "INDEX_DTYPE": torch.int64, **options}
    exec(text, names)
    runs = n * expected.shape[2] * language.cdiv(expected.shape[3], options["RUN"])
    for program in itertools.product(
        range(language.cdiv(runs, options["BLOCK_R"])), range(language.cdiv(c, options["BLOCK_C"]))
    ):
        language.program = program
        names["kernel"](0, x.numel())
    assert torch.equal(stored, torch.ones_like(stored))
    torch.testing.assert_close(given, expected)
