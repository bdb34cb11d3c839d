"""Strides by the name of a layout. Without torch."""

from __future__ import annotations

from collections.abc import Sequence


def strides_in(layout: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of this shape in that layout, in elements."""
    slowest_last = list(reversed(range(len(shape))))
    if layout != "contiguous":
        slowest_last = [1, *(axis for axis in slowest_last if axis != 1)]
    strides, step = [0] * len(shape), 1
    for axis in slowest_last:
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def overlaps_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements of a dense tensor would lie at one place, or might."""
    reach = 0
    for step, size in sorted((abs(step), size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False
