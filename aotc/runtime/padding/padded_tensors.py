"""Growing inputs to a bucket's sizes, and cutting outputs back to the request's."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aotc.call_table.dispatch import Crop, Pad
from aotc.errors import CorruptError
from aotc.runtime.padding.cut_views import cut_copies
from aotc.tensors.layouts import laid_out

MOST_BYTES = 1 << 47
"""The addresses that a process has."""


def apply_pad(tensor: Tensor, pad: Pad) -> Tensor:
    """The tensor with the axis grown at its end. An empty axis has no edge to repeat and is filled with 0.

    Raises CorruptError for a size that no memory holds.
    """
    missing = pad.size - tensor.shape[pad.axis]
    shape = list(tensor.shape)
    shape[pad.axis] = pad.size
    if math.prod(shape) * tensor.element_size() > MOST_BYTES or pad.size > MOST_BYTES:
        raise CorruptError(f"the record's {pad} makes an input of the sizes {shape}, which no memory holds")
    shape[pad.axis] = missing
    if pad.rule.edge and tensor.shape[pad.axis]:
        filling = tensor.narrow(pad.axis, -1, 1).expand(shape)
    else:
        filling = tensor.new_full(shape, 0 if pad.rule.edge else pad.rule.value)  # type: ignore[arg-type]
    # cat picks a layout of its own where the two parts differ in theirs, and compiled code checks no strides
    return laid_out(torch.cat([tensor, filling], dim=pad.axis), pad.layout)


class _OfThread(threading.local):
    crops: Sequence[Crop] = ()
    """Of the launch that runs."""


_own = _OfThread()


def cropped(launch: Callable[..., list[Tensor]], crops: Sequence[Crop]) -> Callable[..., list[Tensor]]:
    """The launch, whose outputs are cropped; by the launch itself, if it takes the crops."""

    def run(*arguments: Any) -> list[Tensor]:
        _own.crops = crops
        try:
            outputs = launch(*arguments)
            apply_crops(outputs, _own.crops)
        finally:
            _own.crops = ()
        return outputs

    return run


def take_crops() -> Sequence[Crop]:
    """Of the launch that runs: it has to crop its outputs itself."""
    crops, _own.crops = _own.crops, ()
    return crops


def apply_crops(outputs: list[Any], crops: Sequence[Crop]) -> None:
    """Cut off what was padded, in place: outputs without gaps, with memory of their own, or that of another output, as
    eager gives them. Raises CorruptError for an output or an axis that is not there."""
    parts: dict[int, Tensor] = {}
    for crop in crops:
        if not 0 <= crop.output < len(outputs):
            raise CorruptError(f"the record's {crop} does not fit the library's {len(outputs)} outputs")
        parts[crop.output] = cut(parts.get(crop.output, outputs[crop.output]), [crop])
    for index, tensor in cut_copies(outputs, parts).items():
        outputs[index] = tensor


def cut(output: Tensor, crops: Sequence[Crop]) -> Tensor:
    """A view of an output without its pads. Raises CorruptError for an axis that is not there."""
    for crop in crops:
        try:
            output = output.narrow(crop.axis, 0, crop.size)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:  # the last two: no 64 bits hold the size
            raise CorruptError(f"the record's {crop} does not fit the library's output: {error}") from error
    return output
