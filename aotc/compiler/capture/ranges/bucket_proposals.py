"""Propose edits of a manifest's bucket, for a model with no graph that holds for the whole range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from aotc.records import SizeRange

EXAMINED = 65_536
"""Sizes of a range that are examined, from its smallest."""
SHOWN = 5
"""Buckets that a proposal lists."""


def sizes_of(sizes: SizeRange) -> range:
    """The sizes of a range, smallest first; at most EXAMINED of them."""
    step = sizes.multiple_of
    every = range(-(-sizes.min // step) * step, sizes.max + 1, step)
    return every[:EXAMINED]


def split_proposal(dim: str, sizes: SizeRange, takes: Callable[[int], bool]) -> str:
    """Buckets for the sizes that `takes` accepts, as ranges, and for refused sizes between these, alone; "" for none.

    Sizes that are not multiples of the accepted sizes' common step are left out: a model that needs `seq % 8 == 0`
    accepts no other.
    """
    accepted = [size for size in sizes_of(sizes) if takes(size)]
    if not accepted:
        return ""
    step = math.gcd(*accepted) or 1
    if len(accepted) == 1:
        step = accepted[0] or 1
    if (accepted[-1] - accepted[0]) // step < 2 * len(accepted) - 1:
        # More than half of the multiples between the first and the last are accepted: the others get their own buckets.
        candidates = [size for size in sizes_of(sizes) if size % step == 0]
    else:
        candidates = accepted
    inside = set(accepted)
    pieces = [form for run in _runs(candidates, step, inside) for form in [_form(dim, sizes, run, step)]]
    return " and ".join(pieces) if len(pieces) <= SHOWN else ""


def _runs(candidates: Iterable[int], step: int, inside: set[int]) -> list[list[int]]:
    """Runs of neighbouring sizes that are all accepted or all refused."""
    runs: list[list[int]] = []
    for size in candidates:
        last = runs[-1][-1] if runs else None
        if last is not None and size == last + step and (size in inside) == (last in inside):
            runs[-1].append(size)
        else:
            runs.append([size])
    return runs


def _form(dim: str, sizes: SizeRange, run: Sequence[int], step: int) -> str:
    """A bucket's size in the manifest's syntax."""
    if len(run) == 1:
        return f"`{dim}: {run[0]}`"
    parts = [f"range: [{run[0]}, {run[-1]}]"]
    if step > 1:
        parts.append(f"multiple_of: {step}")
    if sizes.tune_at in run and sizes.tune_at != run[-1]:
        parts.append(f"tune_at: {sizes.tune_at}")
    return f"`{dim}: {{{', '.join(parts)}}}`"
