"""Which input an index that is out of bounds came with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aotc.errors import Issue, LibraryError
from aotc.records import Leaf, TensorLeaf

_BOUND = re.compile(r"index out of bounds: .*<= .* < ([0-9]+)")
"""What Inductor's kernels for CPUs say; the index is a variable's name there."""


def with_indices(error: LibraryError, leaves: Sequence[Leaf], values: Sequence[Any]) -> LibraryError:
    """The error, with each input of integers that holds values outside that table: the first such value, and its place.
    An index that the model computes comes with none.

    Negative values count from the table's end in some operators only: they are named where no others are wrong.
    """
    found = _BOUND.search(error.message)
    if found is None:
        return error
    size = int(found[1])
    inputs = [
        (leaf.path, value)
        for leaf, value in zip(leaves, values, strict=True)
        if isinstance(leaf, TensorLeaf) and _may_be_index(value)
    ]
    issues = _issues(inputs, size, -size) or _issues(inputs, size, 0)
    return LibraryError(error.message, hint=error.hint, issues=(*error.issues, *issues), **error.fields)


def _may_be_index(value: Any) -> bool:
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return isinstance(value, Tensor) and value.dtype in kinds and not value.is_cuda


def _issues(inputs: Sequence[tuple[str, Tensor]], size: int, least: int) -> list[Issue]:
    """Of each input the first value that is `size` or more, or less than `least`."""
    issues = []
    for path, value in inputs:
        beyond = ((value >= size) | (value < least)).nonzero()
        if len(beyond):
            place = beyond[0].tolist()
            first = str(value[tuple(place)].item())
            at = f" at {place}" if place else ""
            told = f"holds {first}{at}, beyond a table of {size} entries"
            issues.append(Issue(told, where=path, expected=f"{least} to {size - 1}", actual=first))
    return issues
