"""Results that the model wrote into a copy of an input, back into the caller's tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def write_back(ran: Sequence[Any], leaves: Sequence[Any], written: Iterable[int]) -> None:
    """From those of `ran` that are copies, perhaps padded, into the leaves as they were given."""
    for index in written:
        if ran[index].data_ptr() != leaves[index].data_ptr():
            write_into(leaves[index], ran[index][tuple(slice(size) for size in leaves[index].shape)])


def write_into(target: Tensor, values: Tensor) -> None:
    """Also into an inference tensor, outside of that mode: torch refuses it there, and compiled code writes to it."""
    if not target.is_inference():
        target.copy_(values)
        return
    with torch.inference_mode():
        target.copy_(values)
