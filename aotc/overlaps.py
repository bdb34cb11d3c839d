"""Which tensors lie in one memory: views of one storage, or what others made of one buffer."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch
from torch import Tensor


def overlapping(tensors: Sequence[Tensor], written: Container[int]) -> Iterator[tuple[int, int]]:
    """The pairs of tensors, by their positions, of which elements lie at one place and one is `written` to."""
    extents = sorted((*extent(tensor), index) for index, tensor in enumerate(tensors) if has_memory(tensor))
    open_ones: list[tuple[int, int]] = []
    for first, end, index in extents:
        open_ones = [(other_end, other) for other_end, other in open_ones if other_end > first]
        for _, other in open_ones:
            if (index in written or other in written) and _overlap(tensors[other], tensors[index]):
                yield min(index, other), max(index, other)
        open_ones.append((end, index))


def has_memory(tensor: Tensor) -> bool:
    """Whether its elements lie at addresses: not those of a sparse tensor, or of one on the meta device."""
    return bool(tensor.numel()) and tensor.layout is torch.strided and not tensor.is_meta


def extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one behind its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Of two whose extents have bytes in common: like columns of a matrix, they may lie between each other."""
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
