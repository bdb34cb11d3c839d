"""A template for depthwise convolutions of channels-last images, as a candidate of races.

cuDNN's kernels for these are compiled by the driver in the process that runs them: on an H200 (torch 2.11, cuDNN 9) 0.2
to 1.9 s for each kernel that is new to the host. Its kernels for other convolutions are precompiled. Inductor's
template of a convolution multiplies matrices, which a depthwise convolution does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.shared.convolutions import is_depthwise
from aotc.compiler.patches.shared.inductor import inductor

PATCH = Patch(
    __name__,
    kind="performance",
    device="cuda",
    targets=("torch._inductor.kernel.conv:conv2d_template.maybe_append_choice(choices, **kwargs)",),
)

NAME = "depthwise_conv2d"

SOURCE = Path(__file__).with_suffix(".jinja")

_MOST_WRITTEN_OUT = 128
"""The limit for the unrolled multiplications of a run with one row of the window."""

_WINDOW = ("KERNEL_H", "KERNEL_W", "STRIDE_H", "STRIDE_W", "PADDING_H", "PADDING_W")


class Block(NamedTuple):
    """One configuration: neighbouring results of a row in a run, which share their loads; runs and channels of a
    program; its warps."""

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
def apply() -> Iterator[None]:
    """While active, `BLOCKS` replace Inductor's own template in races for a depthwise convolution."""
    inductors = inductor("kernel.conv").conv2d_template
    append = inductors.maybe_append_choice

    def append_or_race(choices: list[Any], *, input_nodes: Sequence[Any], layout: Any, **kwargs: Any) -> Any:
        if not is_depthwise(input_nodes, kwargs["GROUPS"]):
            return append(choices, input_nodes=input_nodes, layout=layout, **kwargs)
        if any(NAME in choice.name for choice in choices):
            return None  # Inductor asks once for each of its configurations
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

    with replaced(inductors, "maybe_append_choice", append_or_race):
        yield


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
