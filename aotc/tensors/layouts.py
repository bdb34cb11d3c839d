"""The layouts of inputs: the exact strides of a tensor.

Where an axis has one element its stride says nothing of where elements lie, and torch takes a tensor for contiguous
whatever it is. ATen's convolutions look at it all the same: grey images that were permuted from channels last are
contiguous by `Tensor.is_contiguous`, and give an output with channels last. Compiled code was told how that output
lies: so it is given the strides that it was compiled for, on such axes too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aotc.tensors.strides import strides_in

MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in that layout: itself, a view, or a copy where its elements are in another order."""
    lying_so = tensor.contiguous(memory_format=MEMORY_FORMATS[layout])
    return with_strides(lying_so, strides_in(layout, tensor.shape))


def with_strides(tensor: Tensor, strides: Sequence[int], *, detached: bool = True) -> Tensor:
    """The tensor, or a view of it where its strides differ on axes of size 1, or it has no elements."""
    if tensor.stride() == strides:
        return tensor
    return (tensor.detach() if detached else tensor).as_strided(tensor.shape, strides)


def has_memory(tensor: Tensor) -> bool:
    """Whether its elements have addresses: not those of a sparse tensor, of one on the meta device, of torch's lazy
    zeros and functional wrappers, or of one whose storage was made empty."""
    if not tensor.numel() or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # within a transform of torch.func
        return False
