"""Growing inputs to a bucket's sizes, and cutting outputs back to the request's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aotc.errors import CorruptError
from aotc.records import PadRule
from aotc.tensors.layouts import laid_out


class Pad(NamedTuple):
    """Grow axis `axis` of a leaf from the request's size to `size`, by `rule`; the result lies in `layout`."""

    leaf: int
    axis: int
    size: int
    rule: PadRule
    layout: str = "contiguous"


class Crop(NamedTuple):
    """Cut axis `axis` of an output back to `size`."""

    output: int
    axis: int
    size: int


def apply_pad(tensor: Tensor, pad: Pad) -> Tensor:
    """The tensor with the axis grown at its end. An empty axis has no edge to repeat and is filled with 0."""
    missing = pad.size - tensor.shape[pad.axis]
    shape = list(tensor.shape)
    shape[pad.axis] = missing
    if pad.rule.edge and tensor.shape[pad.axis]:
        filling = tensor.narrow(pad.axis, -1, 1).expand(shape)
    else:
        filling = tensor.new_full(shape, 0 if pad.rule.edge else pad.rule.value)  # type: ignore[arg-type]
    # cat picks a layout of its own where the two parts differ in theirs, and compiled code checks no strides
    return laid_out(torch.cat([tensor, filling], dim=pad.axis), pad.layout)


def apply_crops(outputs: list[Tensor], crops: Sequence[Crop]) -> None:
    """Cut off what was padded, in place. Raises CorruptError for an output or an axis that is not there."""
    for crop in crops:
        try:
            outputs[crop.output] = outputs[crop.output].narrow(crop.axis, 0, crop.size)
        except (IndexError, RuntimeError) as error:
            raise CorruptError(f"the record's {crop} does not fit the library's output: {error}") from error
