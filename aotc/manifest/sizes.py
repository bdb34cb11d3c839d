"""Bucket sizes: from the manifest's forms to `records.Size`, and the product of a grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from aotc.records import Bucket, Dims, Size, SizeRange

MAX_BUCKETS = 10_000


class ImpossibleSizeError(ValueError):
    """No such size can exist. `hint` says what could."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def parse_size(value: Any) -> Size:
    """A size from its form in the manifest: `128`, `[1, 512]` or `{range: [1, 512], multiple_of: 8, tune_at: 512}`.

    A range's ends are drawn in to sizes that belong to it, and a range of one size is that size. Raises
    ImpossibleSizeError for a range without sizes, or tuned outside of itself.
    """
    if isinstance(value, int):
        return value
    form = value if isinstance(value, Mapping) else {"range": value}
    low, high = form["range"]
    step = form.get("multiple_of", 1)
    if low > high:
        raise ImpossibleSizeError(
            f"the range [{low}, {high}] is empty: {low} is more than {high}", f"write [{high}, {low}]"
        )
    first, last = -(-low // step) * step, high // step * step
    if first > last:
        message = f"the range [{low}, {high}] holds no multiple of {step}"
        raise ImpossibleSizeError(message, f"widen it to hold {last} or {first}")
    sizes = SizeRange(min=first, max=last, multiple_of=step, tune_at=form.get("tune_at", last))
    if sizes.tune_at not in sizes:
        hint = f"the nearest size in it is {_nearest_member(sizes)}"
        raise ImpossibleSizeError(f"tune_at is {sizes.tune_at}, which is not in the range {sizes}", hint)
    return first if first == last else sizes


def size_text(size: Size) -> str:
    """A size in the manifest's syntax, which `parse_size` reads back."""
    if isinstance(size, int):
        return str(size)
    parts = [f"range: [{size.min}, {size.max}]"]
    if size.multiple_of > 1:
        parts.append(f"multiple_of: {size.multiple_of}")
    if size.tune_at != size.max:
        parts.append(f"tune_at: {size.tune_at}")
    return f"{{{', '.join(parts)}}}"


def _nearest_member(sizes: SizeRange) -> int:
    step = sizes.multiple_of
    return min(max((sizes.tune_at + step // 2) // step * step, sizes.min), sizes.max)


def grid_product(grid: Mapping[str, list[Size]]) -> list[Bucket]:
    """Every combination of the grid's sizes; none for an empty grid. The order of dims does not matter.

    Raises ImpossibleSizeError for more than MAX_BUCKETS combinations.
    """
    if not grid:
        return []
    count = math.prod(len(sizes) for sizes in grid.values())
    if count > MAX_BUCKETS:
        message = f"the grid has {count} buckets; a model may have {MAX_BUCKETS}"
        raise ImpossibleSizeError(message, "use ranges, or fewer sizes")
    dims = sorted(grid)
    return [dict(zip(dims, sizes, strict=True)) for sizes in itertools.product(*(grid[dim] for dim in dims))]


def distinct_buckets(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """The buckets with sorted dims, each the first time it comes; one empty bucket if there are none."""
    by_sizes = {tuple(sorted(bucket.items())): dict(sorted(bucket.items())) for bucket in buckets}
    return tuple(by_sizes.values()) or ({},)


def extreme_dims(bucket: Bucket, dims: Iterable[str]) -> Iterable[Dims]:
    """Every combination of these dims' smallest, largest and tuned sizes in a bucket."""
    names = sorted(dims)
    choices = [_extremes(bucket[dim]) for dim in names]
    return (dict(zip(names, sizes, strict=True)) for sizes in itertools.product(*choices))


def _extremes(size: Size) -> tuple[int, ...]:
    if isinstance(size, int):
        return (size,)
    return tuple(dict.fromkeys((size.min, size.max, size.tune_at)))
