"""What no set of `k` buckets can beat, for several padded dims: a Lagrangian bound of the k-median problem.

For any prices `v` of the calls, `sum(v) - (the k largest of gain(b))` is at most the cost of every set of `k` buckets,
where `gain(b)` sums `max(0, v(s) - cost(s, b))` over the calls that `b` holds. Subgradient steps raise it.

The buckets with the largest gains are also good starts for a local search.

Buckets may stand anywhere, so they are put into classes: each dim is divided into levels, and a bucket is rounded down
to its levels, β. A call `s` that runs in any bucket of the class β pays at least the cost of the join of `s` and β, as
costs do not fall when a dim grows. Calls of the same levels share a price.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aotc.advise.costs import Cost
from aotc.advise.trace import Shape

CELLS = 500
"""Classes of calls, about."""
STARTS = 4
WORK = 12_000_000
"""Pairs of a class of calls and a class of buckets that are looked at, in all steps."""


class Bound(NamedTuple):
    """A cost below which so many buckets cannot get, and the buckets that were open when it was raised last."""

    cost: float
    starts: tuple[tuple[Shape, ...], ...]


def lower_bound(
    counts: Mapping[Shape, int], cost: Cost, axes: Sequence[int], most: int, known: float, spare: Cost | None = None
) -> Bound:
    """The bound for `most` buckets. `known` is the cost of the buckets found; `spare` as in `partition.cheapest`."""
    ideal = sum(count * cost(shape) for shape, count in counts.items())
    if known <= ideal or not most:
        return Bound(known, ())
    levels = _levels(counts, axes)
    tops: dict[int, dict[int, int]] = {
        axis: {level: max(size for size in row if row[size] == level) for level in row.values()}
        for axis, row in levels.items()
    }
    corners, costs, ceilings = _pairs(counts, cost, levels, axes, spare)
    pairs = sum(map(len, costs))
    value, opened = _raised(costs, ceilings, most, known, max(20, min(300, WORK // max(1, pairs))))
    starts = tuple(
        tuple(tuple([tops[a][size] if a in tops else size for a, size in enumerate(corners[b])]) for b in boxes)
        for boxes in opened
    )
    return Bound(max(ideal, value), starts)


def _pairs(
    counts: Mapping[Shape, int],
    cost: Cost,
    levels: Mapping[int, Mapping[int, int]],
    axes: Sequence[int],
    spare: Cost | None,
) -> tuple[list[Shape], list[list[tuple[int, float]]], list[float]]:
    """The classes of buckets; for each, the classes of calls that it may hold and what these cost there at least; and
    for each class of calls what it costs without a bucket."""
    cells: dict[Shape, list[Shape]] = defaultdict(list)
    for shape in sorted(counts):
        cells[tuple([levels[a][size] if a in levels else size for a, size in enumerate(shape)])].append(shape)
    names = list(cells)
    calls = [sum(counts[shape] for shape in cells[name]) for name in names]
    exact = [axis for axis in range(len(names[0])) if axis not in axes]
    groups: dict[Shape, list[int]] = defaultdict(list)
    for n, name in enumerate(names):
        groups[tuple(name[axis] for axis in exact)].append(n)
    corners, found = [], []
    for members in groups.values():
        for corner in _corners([names[n] for n in members]):
            row = []
            for n in members:
                name = names[n]
                if not all(map(int.__ge__, corner, name)):
                    continue
                if all(corner[axis] > name[axis] for axis in axes):  # then above every call of the class
                    row.append((n, calls[n] * cost(corner)))
                else:
                    row.append((n, sum(counts[s] * cost(tuple(map(max, s, corner))) for s in cells[name])))
            found.append(row)
            corners.append(corner)
    ceilings = [sum(counts[s] * spare(s) for s in cells[name]) if spare else math.inf for name in names]
    return corners, found, ceilings


def _levels(counts: Mapping[Shape, int], axes: Sequence[int]) -> dict[int, dict[int, int]]:
    """For each padded dim, the level of each size: the least size of its level. As many levels as CELLS allow."""
    most = max(len({shape[axis] for shape in counts}) for axis in axes)
    while True:
        levels = {axis: _leveled(counts, axis, most) for axis in axes}
        cells = {tuple([levels[a][size] if a in levels else size for a, size in enumerate(shape)]) for shape in counts}
        if len(cells) <= CELLS or most <= 2:
            return levels
        most = min(most, 256) * 3 // 4 if most > 32 else most - 2


def _leveled(counts: Mapping[Shape, int], axis: int, most: int) -> dict[int, int]:
    weights: dict[int, int] = defaultdict(int)
    for shape, count in counts.items():
        weights[shape[axis]] += count * math.prod(shape)
    share, filled, found, level = sum(weights.values()) / most, math.inf, {}, 0
    for size in sorted(weights):
        if filled >= share or len(weights) <= most:
            level, filled = size, 0.0
        found[size] = level
        filled += weights[size]
    return found


def _corners(cells: Sequence[Shape]) -> list[Shape]:
    """The joins of these classes: what a bucket that is drawn in to its calls is rounded down to."""
    found = {*cells}
    fresh = found
    while fresh:
        joined = {tuple(map(max, a, b)) for a in fresh for b in cells}
        fresh = joined - found
        found |= fresh
    return sorted(found)


def _raised(
    costs: Sequence[Sequence[tuple[int, float]]], ceilings: Sequence[float], k: int, known: float, steps: int
) -> tuple[float, list[list[int]]]:
    """The best bound of so many subgradient steps, and what was open in the last STARTS of those that raised it."""
    least = [math.inf] * len(ceilings)
    for row in costs:
        for n, price in row:
            least[n] = min(least[n], price)
    # to begin with, prices in the proportion of the calls' own costs, that add up to the known cost
    scale = known / sum(least)
    prices = [min(price * scale, ceiling) for price, ceiling in zip(least, ceilings, strict=True)]
    best, pace, idle = 0.0, 1.0, 0
    starts: list[list[int]] = []
    for _ in range(steps):
        gains = [sum([prices[n] - price for n, price in row if price < prices[n]]) for row in costs]
        opened = heapq.nlargest(k, range(len(gains)), key=gains.__getitem__)
        value = sum(prices) - sum(gains[b] for b in opened)
        if value > best * (1 + 1e-6):
            best, idle = value, 0
            starts.append(opened)
        else:
            idle += 1
            if idle == 5:
                pace, idle = pace / 2, 0
        covered = [0] * len(prices)
        for b in opened:
            for n, price in costs[b]:
                if price < prices[n]:
                    covered[n] += 1
        slope = [1 - times for times in covered]
        # steps in proportion to the costs, which differ by orders of magnitude
        steep = sum(one * one * size for one, size in zip(slope, least, strict=True))
        if best >= known * (1 - 1e-9) or steep == 0 or pace < 1e-3:
            break
        step = pace * max(known - value, 0.0) / steep
        prices = [
            min(max(price + step * one * size, 0.0), ceiling)
            for price, one, size, ceiling in zip(prices, slope, least, ceilings, strict=True)
        ]
    return min(best, known), starts[-STARTS:]
