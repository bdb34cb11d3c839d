"""Which tensors share memory: views of one storage, or tensors that other libraries made of one buffer."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Container, Iterator, Sequence

import torch
from torch import Tensor

from aotc.tensors.layouts import has_memory


def overlapping(tensors: Sequence[Tensor], written: Container[int]) -> Iterator[tuple[int, int]]:
    """The pairs of tensors, by their positions, that share elements and of which one is `written` to."""
    extents = sorted((*extent(tensor), index) for index, tensor in enumerate(tensors) if has_memory(tensor))
    open_ones: list[tuple[int, int]] = []
    for first, end, index in extents:
        open_ones = [(other_end, other) for other_end, other in open_ones if other_end > first]
        for _, other in open_ones:
            if (index in written or other in written) and _overlap(tensors[other], tensors[index]):
                yield min(index, other), max(index, other)
        open_ones.append((end, index))


def sharing_groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The groups of tensors, by their positions, that have a storage in common and whose extents in it meet."""
    groups: list[list[int]] = []
    storage, furthest = 0, 0
    for own, first, end, index in sorted(
        (tensor.untyped_storage().data_ptr(), *extent(tensor), index)
        for index, tensor in enumerate(tensors)
        if has_memory(tensor)
    ):
        if groups and own == storage and first < furthest:
            groups[-1].append(index)
            furthest = max(furthest, end)
        else:
            groups.append([index])
            storage, furthest = own, end
    return [group for group in groups if len(group) > 1]


class Places:
    """The address ranges of some tensors, searched for those that another one overlaps."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        extents = sorted((*extent(tensor), index) for index, tensor in enumerate(tensors) if has_memory(tensor))
        self._tensors = tensors
        self._firsts = [first for first, _, _ in extents]
        self._indices = [index for _, _, index in extents]
        # The furthest end of the tensors up to each: one may lie within another.
        self._ends = list(itertools.accumulate((end for _, end, _ in extents), max))

    def overlapped_by(self, tensor: Tensor) -> list[int]:
        """The positions of those that have an element in common with this tensor."""
        if not has_memory(tensor):
            return []
        first, end = extent(tensor)
        found = []
        position = bisect.bisect_left(self._firsts, end) - 1
        while position >= 0 and self._ends[position] > first:
            index = self._indices[position]
            other = self._tensors[index]
            if extent(other)[1] > first and _overlap(other, tensor):
                found.append(index)
            position -= 1
        return sorted(found)


def extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one behind its last."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Of two tensors with overlapping address ranges: like columns of a matrix, their elements may still alternate."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    extents = extent(one), extent(other)
    first, end = min(start for start, _ in extents), max(end for _, end in extents)
    return bool((_bytes_of(one, first, end) & _bytes_of(other, first, end)).any())


def _bytes_of(tensor: Tensor, first: int, end: int) -> Tensor:
    """Which of the bytes from `first` to `end` are the tensor's."""
    bytes_of = torch.zeros(end - first, dtype=torch.bool, device="cpu")
    size = tensor.element_size()
    axes = [(count, step * size) for count, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
    shape, strides = zip(*axes, (size, 1), strict=True)
    bytes_of.as_strided(shape, strides, tensor.data_ptr() - first).fill_(True)
    return bytes_of
