"""Which input an index that is out of bounds came with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from aotc.errors import Issue, LibraryError
from aotc.records import Leaf, TensorLeaf

_BOUND = re.compile(r"index out of bounds: .*<= .* < ([0-9]+)")
"""What Inductor's kernels for CPUs say; the index is a variable's name there."""


def with_indices(error: LibraryError, leaves: Sequence[Leaf], values: Sequence[Any]) -> LibraryError:
    """The error, with each input of integers that holds values outside that table, and the first such
    value. An index that the model computes comes with none."""
    found = _BOUND.search(error.message)
    if found is None:
        return error
    size = int(found[1])
    issues = [
        Issue(
            f"holds {first}, beyond a table of {size} entries", where=leaf.path, expected=f"below {size}", actual=first
        )
        for leaf, value in zip(leaves, values, strict=True)
        if isinstance(leaf, TensorLeaf) and (first := _first_beyond(value, size))
    ]
    return LibraryError(error.message, hint=error.hint, issues=(*error.issues, *issues), **error.fields)


def _first_beyond(value: Any, size: int) -> str:
    if not isinstance(value, Tensor) or value.dtype.is_floating_point or value.dtype.is_complex or value.is_cuda:
        return ""
    beyond = value[(value >= size) | (value < -size)]
    return str(beyond[0].item()) if beyond.numel() else ""
