"""Outputs without their pads. One that is a view of another is a view of that one's copy, as in eager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aotc.tensors.overlaps import extent, sharing_groups


def cut_copies(outputs: Sequence[Any], parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """What takes the place of outputs, by their positions: copies without gaps of `parts`, which are outputs without
    their pads, and views of such copies."""
    copies: dict[int, Tensor] = {}
    positions = [at for at, output in enumerate(outputs) if isinstance(output, Tensor)]
    for group in sharing_groups([outputs[at] for at in positions]):
        members = {positions[at]: outputs[positions[at]] for at in sorted(group)}
        if not any(member.requires_grad for member in members.values()):  # else autograd has to see each copy
            copies |= _copies_of_views(members, parts)
    return copies | {at: without_gaps(part) for at, part in parts.items() if at not in copies}


def without_gaps(tensor: Tensor) -> Tensor:
    """A copy in which the axes follow one another as in `tensor`."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    back = [order.index(axis) for axis in range(tensor.ndim)]
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _copies_of_views(members: Mapping[int, Tensor], parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Of tensors that share memory: copies of those that hold others, and views of these copies."""
    copies: dict[int, Tensor] = {}
    for whole, padded in members.items():
        changed = [at for at in members if at != whole and at not in copies and (whole in parts or at in parts)]
        inside = [at for at in changed if _holds(padded, members[at])]
        if whole in copies or not inside:
            continue
        copy = without_gaps(parts[whole]) if whole in parts else padded
        if (axes := _axes(padded, copy)) is None:
            continue
        for at in inside:
            view = _moved(parts.get(at, members[at]), padded, copy, axes)
            if view is not None:
                copies |= {whole: copy, at: view}
    return copies


def _holds(whole: Tensor, tensor: Tensor) -> bool:
    (first, end), (own_first, own_end) = extent(whole), extent(tensor)
    return whole.dtype == tensor.dtype and first <= own_first and own_end <= end


class _Axis(NamedTuple):
    """Of a padded tensor, and of its copy."""

    size: int
    stride: int
    size_of_copy: int
    stride_of_copy: int


def _axes(padded: Tensor, copy: Tensor) -> list[_Axis] | None:
    """From the outermost one; those that follow one another without a gap in both are one. None where `padded` has
    gaps, or its copy no element."""
    axes: list[_Axis] = []
    expected = 1
    for stride, size, size_of_copy, stride_of_copy in sorted(
        zip(padded.stride(), padded.shape, copy.shape, copy.stride(), strict=True)
    ):
        if not size_of_copy or (size != 1 and stride != expected):
            return None
        if size == 1:
            continue
        expected = size * stride
        inner = axes[-1] if axes else None
        if inner and inner.size == inner.size_of_copy and stride_of_copy == inner.size * inner.stride_of_copy:
            axes[-1] = _Axis(size * inner.size, inner.stride, size_of_copy * inner.size, inner.stride_of_copy)
        else:
            axes.append(_Axis(size, stride, size_of_copy, stride_of_copy))
    return axes[::-1]


def _moved(view: Tensor, padded: Tensor, copy: Tensor, axes: Sequence[_Axis]) -> Tensor | None:
    """The tensor of the copy with the elements of `view`, which is one of `padded`; None where the copy lacks one, or
    no strides reach them."""
    place = _steps(int(view.storage_offset() - padded.storage_offset()), axes)  # an empty tensor has no address
    last, strides = place, []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        steps = _steps(stride, axes)
        strides.append(_distance(steps, axes))
        last = [at + step * (size - 1) for at, step in zip(last, steps, strict=True)]
    if any(at >= axis.size_of_copy for at, axis in zip(last, axes, strict=True)):
        return None
    return copy.as_strided(view.shape, strides, copy.storage_offset() + _distance(place, axes))


def _steps(distance: int, axes: Sequence[_Axis]) -> list[int]:
    """Along each axis."""
    steps = []
    for axis in axes:
        step, distance = divmod(distance, axis.stride)
        steps.append(step)
    return steps


def _distance(steps: Sequence[int], axes: Sequence[_Axis]) -> int:
    """In elements of the copy."""
    return sum(step * axis.stride_of_copy for step, axis in zip(steps, axes, strict=True))
