"""Tensors that a call omits, or gives as None, and whose value the manifest states (`default:`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotc.call_table.bind import Binder, Leaves
from aotc.reads.tensors import dtype_of
from aotc.records import Signature, TensorLeaf
from aotc.tensors.layouts import MEMORY_FORMATS

Maker = tuple[int, Callable[[Leaves], Tensor | None]]


def makers_of(signature: Signature, device: torch.device) -> list[Maker]:
    """Of each leaf that has a default, its index and what makes the tensor for a call without it, on `device`.

    Its sizes are those of the call's other tensors. Where these are not tensors of enough axes, None stays: a miss.
    """
    return [
        (index, _maker(leaf, signature, device))
        for index, leaf in enumerate(signature.leaves)
        if isinstance(leaf, TensorLeaf) and leaf.default is not None
    ]


def with_defaults(bind: Binder, makers: Sequence[Maker]) -> Binder:
    """The binder, whose leaves have a tensor in the place of each None that has a default."""

    def bind_all(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Leaves:
        leaves = bind(args, kwargs)
        for index, make in makers:
            if leaves[index] is None:
                leaves[index] = make(leaves)
        return leaves

    return bind_all


def _maker(leaf: TensorLeaf, signature: Signature, device: torch.device) -> Callable[[Leaves], Tensor | None]:
    places = {
        entry: (index, axis)
        for index, other in enumerate(signature.leaves)
        if isinstance(other, TensorLeaf) and other.default is None
        for axis, entry in enumerate(other.shape)
    }
    sizes = [places[entry] if isinstance(entry, str) else entry for entry in leaf.shape]
    dtype, memory_format = dtype_of(leaf.dtype), MEMORY_FORMATS[leaf.layout]

    def make(leaves: Leaves) -> Tensor | None:
        shape = []
        for size in sizes:
            if isinstance(size, tuple):
                index, axis = size
                tensor = leaves[index]
                if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.dim() <= axis:
                    return None
                size = tensor.shape[axis]
            shape.append(size)
        made = torch.full(shape, leaf.default, dtype=dtype, device=device)  # type: ignore[arg-type]
        return made.contiguous(memory_format=memory_format)

    return make
