"""Convolutions for which Inductor has no Triton template, by products and by convolutions for which it has one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *form: Any) -> Any:
    """As `aten.convolution`, with its stride, padding, dilation, whether it is transposed, output padding and groups.

    NotImplemented where Inductor has a template, and where it has neither that nor another way: of a range of sizes,
    and of a dilated transposed one."""
    stride, padding, dilation, transposed, output_padding, groups = form
    plain = all(step == 1 for step in dilation)
    fixed = all(isinstance(size, int) for size in (*x.shape[2:], *weight.shape))
    if transposed and plain and fixed:
        return _transposed(x, weight, bias, stride, padding, output_padding, groups)
    if not transposed and not plain and fixed:
        return _dilated(x, weight, bias, stride, padding, dilation, groups)
    depthwise = groups > 1 and weight.shape[1] == 1  # the one template along one axis
    if transposed or not plain or x.dim() != 3 or depthwise:
        return NotImplemented
    spread = [1, *stride], [0, *padding], [1, 1], False, [0, 0], groups
    return _aten.convolution(x.unsqueeze(2), weight.unsqueeze(2), bias, *spread).squeeze(2)


def _dilated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """A plain convolution of a batch that is `prod(dilation)` times as large: elements that are `dilation` apart in `x`
    become neighbours there."""
    axes, batch = len(dilation), x.shape[0]
    missing = [-(size + 2 * pad) % step for size, pad, step in zip(x.shape[2:], padding, dilation, strict=True)]
    ends = ((pad, pad + more) for pad, more in zip(padding, missing, strict=True))
    x = functional.pad(x, [each for pair in reversed(list(ends)) for each in pair])
    parts = [part for size, step in zip(x.shape[2:], dilation, strict=True) for part in (size // step, step)]
    places, steps = range(2, 2 + 2 * axes, 2), range(3, 3 + 2 * axes, 2)
    x = x.reshape(*x.shape[:2], *parts).permute(*steps, 0, 1, *places)
    x = x.reshape(-1, *x.shape[axes + 1 :])
    ones, zeros = [1] * axes, [0] * axes
    y: Tensor = _aten.convolution(x, weight, bias, ones, zeros, ones, False, zeros, groups)
    y = y.reshape(*dilation, batch, *y.shape[1:])
    order = [axis for pair in zip(range(axes + 2, 2 * axes + 2), range(axes), strict=True) for axis in pair]
    y = y.permute(axes, axes + 1, *order)
    y = y.reshape(*y.shape[:2], *(y.shape[at] * y.shape[at + 1] for at in places))
    for axis, (more, step) in enumerate(zip(missing, stride, strict=True), 2):
        y = y[(slice(None),) * axis + (slice(0, y.shape[axis] - more, step),)]
    return y.contiguous()


def _transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """One product gives the window of each element of `x`; the windows are then added up. Along an axis, up to `taps`
    windows overlap."""
    sizes, windows, axes = x.shape[2:], weight.shape[2:], len(stride)
    taps = [-(-window // step) for window, step in zip(windows, stride, strict=True)]
    more = [tap * step - window for tap, step, window in zip(taps, stride, windows, strict=True)]
    weight = functional.pad(weight, [each for missing in reversed(more) for each in (0, missing)])
    channels, batch = weight.shape[1], x.shape[0]
    rows = x.reshape(batch, groups, -1, math.prod(sizes)).permute(1, 0, 3, 2).reshape(groups, -1, x.shape[1] // groups)
    kernels = weight.reshape(groups, x.shape[1] // groups, -1)
    y = rows * kernels if rows.shape[-1] == 1 else rows @ kernels
    split = [part for tap, step in zip(taps, stride, strict=True) for part in (tap, step)]
    y = y.reshape(groups, batch, *sizes, channels, *split)
    windows_of = ((2 + axis, 3 + axes + 2 * axis, 4 + axes + 2 * axis) for axis in range(axes))
    y = y.permute(1, 0, 2 + axes, *(each for triple in windows_of for each in triple))
    y = y.reshape(batch, groups * channels, *y.shape[3:])
    for axis, tap in enumerate(taps, 2):  # its places, taps and steps become one axis
        behind = 2 * (y.dim() - axis - 2)
        shifted = [functional.pad(y.select(axis + 1, at), [0] * behind + [at, tap - 1 - at]) for at in range(tap)]
        summed = sum(shifted[1:], shifted[0])
        y = summed.reshape(*summed.shape[:axis], -1, *summed.shape[axis + 2 :])
    ends = [
        (-pad, (size - 1) * step + window + extra - pad - whole)
        for size, step, window, pad, extra, whole in zip(
            sizes, stride, windows, padding, output_padding, y.shape[2:], strict=True
        )
    ]
    y = functional.pad(y, [each for pair in reversed(ends) for each in pair])
    return (y if bias is None else y + bias.view(-1, *[1] * axes)).contiguous()
