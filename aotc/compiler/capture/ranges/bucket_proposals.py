"""Propose edits of a manifest's bucket, for a model with no graph that holds for the whole range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from aotc.manifest.sizes import size_text
from aotc.records import Size, SizeRange

EXAMINED = 65_536
"""Sizes of a range that are examined, from its smallest."""
SHOWN = 5
"""Buckets that a proposal lists."""


def sizes_of(sizes: SizeRange) -> range:
    """The sizes of a range, smallest first; at most EXAMINED of them."""
    step = sizes.multiple_of
    every = range(-(-sizes.min // step) * step, sizes.max + 1, step)
    return every[:EXAMINED]


def proposal(dim: str, instead: Sequence[Size]) -> str:
    """These sizes of a dim as buckets, in the manifest's syntax; "" for more than a person reads."""
    return " and ".join(f"`{dim}: {size_text(size)}`" for size in instead) if len(instead) <= SHOWN else ""


def split_sizes(sizes: SizeRange, takes: Callable[[int], bool]) -> tuple[Size, ...]:
    """The sizes that `takes` accepts, as ranges, and refused sizes between these, alone; none where it accepts none.

    Sizes that are not multiples of the accepted sizes' common step are left out: a model that needs `seq % 8 == 0`
    accepts no other.
    """
    accepted = [size for size in sizes_of(sizes) if takes(size)]
    if not accepted:
        return ()
    step = math.gcd(*accepted) or 1
    if len(accepted) == 1:
        step = accepted[0] or 1
    if (accepted[-1] - accepted[0]) // step < 2 * len(accepted) - 1:
        # More than half of the multiples between the first and the last are accepted: the others get their own buckets.
        candidates = [size for size in sizes_of(sizes) if size % step == 0]
    else:
        candidates = accepted
    return tuple(_size(sizes, run, step) for run in _runs(candidates, step, set(accepted)))


def with_edges_apart(sizes: SizeRange, edge: int, *, takes_edge: bool) -> tuple[Size, ...]:
    """Every size of a range, with those up to `edge` alone: no graph of larger sizes holds for them. `edge` itself is
    left out where the model does not take it."""
    every = sizes_of(sizes)
    alone = [size for size in every if size < edge or (size == edge and takes_edge)]
    rest = [size for size in every if size > edge]
    return (*alone, *([_size(sizes, rest, sizes.multiple_of)] if rest else []))


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


def _size(sizes: SizeRange, run: Sequence[int], step: int) -> Size:
    if len(run) == 1:
        return run[0]
    return SizeRange(run[0], run[-1], step, sizes.tune_at if sizes.tune_at in run else run[-1])
