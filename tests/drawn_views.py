"""Views of a tensor, drawn by hypothesis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor


def drawn_tensor(data: st.DataObject, shape: Sequence[int]) -> Tensor:
    """Its own numbers 0, 1, … without gaps, with the axes in any order."""
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.arange(float(math.prod(shape))).reshape([shape[axis] for axis in order])
    return tensor.permute([order.index(axis) for axis in range(len(shape))])


def drawn_view(data: st.DataObject, view: Tensor) -> Tensor:
    """Of up to three steps."""
    for _ in range(data.draw(st.integers(0, 3))):
        kinds = ["unsqueeze", *(["select", "slice", "transpose", "diagonal"] if view.numel() and view.ndim else [])]
        kind = data.draw(st.sampled_from(kinds))
        axis = data.draw(st.integers(0, view.ndim - 1)) if view.ndim else 0
        if kind == "select":
            view = view.select(axis, data.draw(st.integers(0, view.shape[axis] - 1)))
        elif kind == "slice":
            first, step = data.draw(st.integers(0, view.shape[axis] - 1)), data.draw(st.integers(1, 3))
            view = view[(slice(None),) * axis + (slice(first, None, step),)]
        elif kind == "transpose":
            view = view.transpose(axis, data.draw(st.integers(0, view.ndim - 1)))
        elif kind == "diagonal" and view.ndim > 1:
            view = view.diagonal()
        elif kind == "unsqueeze":
            view = view.unsqueeze(axis)
    return view


def drawn_part(data: st.DataObject, tensor: Tensor) -> Tensor:
    """The first elements along each axis."""
    return tensor[tuple(slice(0, data.draw(st.integers(0, size))) for size in tensor.shape)]
