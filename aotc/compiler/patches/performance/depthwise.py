"""A template for depthwise convolutions of images, whose channels lie side by side, as a candidate of races.

cuDNN has its kernels for these compiled in the process that runs them, by the driver: on an H200 (torch 2.11, cuDNN 9)
0.2 to 1.9 s for each that a host has never had. Its kernels for other convolutions lie compiled in cuDNN. Inductor's
template of a convolution multiplies matrices, of which a depthwise one has none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from aotc.compiler.patches.inductor import inductor

NAME = "depthwise_conv2d"
SOURCE = Path(__file__).with_name("depthwise_conv2d.jinja")

_MOST_WRITTEN_OUT = 128
"""Multiplications of a run with a row of the window, each of which is written out."""

_WINDOW = ("KERNEL_H", "KERNEL_W", "STRIDE_H", "STRIDE_W", "PADDING_H", "PADDING_W")


class Block(NamedTuple):
    """One configuration: results in a run, which lie side by side in a row and share what is loaded for them; runs and
    channels of a program; its warps."""

    run: int
    runs: int
    channels: int
    warps: int


BLOCKS = (
    Block(run=1, runs=8, channels=32, warps=1),
    Block(run=1, runs=16, channels=32, warps=2),
    Block(run=2, runs=4, channels=64, warps=1),
    Block(run=2, runs=8, channels=32, warps=1),
    Block(run=2, runs=8, channels=32, warps=2),
    Block(run=4, runs=4, channels=64, warps=1),
    Block(run=4, runs=8, channels=32, warps=1),
    Block(run=4, runs=8, channels=64, warps=2),
    Block(run=7, runs=4, channels=32, warps=1),
    Block(run=7, runs=8, channels=32, warps=2),
)


@contextmanager
def depthwise_template_raced() -> Iterator[None]:
    """Race `BLOCKS` wherever Inductor's own template would race for a depthwise convolution, in its place."""
    inductors = inductor("kernel.conv").conv2d_template
    append = inductors.maybe_append_choice

    def append_or_race(choices: list[Any], *, input_nodes: Sequence[Any], layout: Any, **kwargs: Any) -> Any:
        if not is_depthwise(input_nodes, kwargs["GROUPS"]):
            return append(choices, input_nodes=input_nodes, layout=layout, **kwargs)
        if any(NAME in choice.name for choice in choices):
            return None  # it was asked for each of Inductor's configurations
        window = {name: kwargs[name] for name in _WINDOW}
        blocks = [block for block in BLOCKS if block.run * window["KERNEL_W"] <= _MOST_WRITTEN_OUT]
        if not blocks:
            return append(choices, input_nodes=input_nodes, layout=layout, **kwargs)
        for block in blocks:
            _template().maybe_append_choice(
                choices,
                input_nodes=input_nodes,
                layout=layout,
                **window,
                RUN=block.run,
                BLOCK_R=block.runs,
                BLOCK_C=block.channels,
                num_stages=2,
                num_warps=block.warps,
            )
        return None

    with mock.patch.object(inductors, "maybe_append_choice", append_or_race):
        yield


def is_depthwise(inputs: Sequence[Any], groups: int) -> bool:
    """Whether each channel of an image, of which one lies beside the other, is convolved on its own, into one."""
    if groups < 2 or len(inputs) < 2:
        return False
    image, weight = inputs[:2]
    size, stride = image.get_size(), image.get_stride()
    return len(size) == 4 and size[1] == groups and tuple(weight.get_size()[:2]) == (groups, 1) and bool(stride[1] == 1)


def is_of_any_size(inputs: Sequence[Any]) -> bool:
    """Whether an image's sizes vary, in a range."""
    return any(getattr(size, "free_symbols", ()) for size in inputs[0].get_size())


@functools.cache
def _template() -> Any:
    template = inductor("select_algorithm").TritonTemplate
    return template(name=NAME, grid=_grid(), source=SOURCE.read_text())


def _grid() -> Any:
    @inductor("select_algorithm").SymbolicGridFn  # type: ignore[untyped-decorator]
    def grid(n: Any, c: Any, h: Any, w: Any, meta: dict[str, Any], *, cdiv: Any) -> Any:
        runs = n * h * cdiv(w, meta["RUN"])
        return cdiv(runs, meta["BLOCK_R"]), cdiv(c, meta["BLOCK_C"]), 1

    return grid
