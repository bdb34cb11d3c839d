"""What a candidate of a convolution's race depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def is_depthwise(inputs: Sequence[Any], groups: int) -> bool:
    """Whether a convolution of a channels-last image maps each channel to one channel of the result."""
    if groups < 2 or len(inputs) < 2:
        return False
    image, weight = inputs[:2]
    size, stride = image.get_size(), image.get_stride()
    return len(size) == 4 and size[1] == groups and tuple(weight.get_size()[:2]) == (groups, 1) and bool(stride[1] == 1)


def is_of_any_size(inputs: Sequence[Any]) -> bool:
    """Whether a size of the image is a range."""
    return any(getattr(size, "free_symbols", ()) for size in inputs[0].get_size())
