"""What no set of `k` buckets can beat, for several padded dims: a Lagrangian bound of the k-median problem.

For any prices `v` of the calls, `sum(v) - (the k largest of gain(b))` is at most the cost of every set of `k` buckets,
where `gain(b)` sums `max(0, v(s) - cost(s, b))` over the calls that `b` holds. Subgradient steps raise it.

The buckets with the largest gains are also good starts for a local search.

Buckets may stand anywhere, so they are put into classes: each dim is divided into levels, and a bucket is rounded down
to its levels, β. A call `s` that runs in any bucket of the class β pays at least the cost of the join of `s` and β, as
costs do not fall when a dim grows. Calls of the same levels share a price.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from aotc.tools.advise.arrays import Floats, Integers, as_shapes, costs_at, distinct, grouped, held, levels, table
from aotc.tools.advise.costs import Cost
from aotc.tools.advise.trace import DimSizes

CELLS = 1200
"""Classes of calls, at most."""
PAIRS = 2_000_000
"""Pairs of a class of calls and a class of buckets, at most."""
STARTS = 4
STEPS = 300


class LowerBound(NamedTuple):
    """A cost below which so many buckets cannot get, and the buckets that were open when it was raised last."""

    cost: float
    starts: tuple[tuple[DimSizes, ...], ...]


def lower_bound(
    counts: Mapping[DimSizes, int], cost: Cost, axes: Sequence[int], most: int, known: float, spare: Cost | None = None
) -> LowerBound:
    """The bound for `most` buckets. `known` is the cost of the buckets found; `spare` as in `partition.cheapest`."""
    sizes, calls = table(counts)
    ideal = float(calls @ costs_at(cost, sizes))
    if known <= ideal or not most:
        return LowerBound(known, ())
    classes = _Classes(sizes, calls, axes)
    prices = classes.prices(cost)
    ceilings = np.full(len(classes.cells), math.inf)
    if spare:
        ceilings = np.bincount(classes.cell, calls * costs_at(spare, sizes))
    value, opened = _raised(prices, ceilings, most, known)
    starts = tuple(tuple(classes.tops(classes.corners[boxes])) for boxes in opened)
    return LowerBound(max(ideal, value), starts)


class _Classes:
    """Classes of calls and of buckets, each named by the least size of its level in every padded dim.

    cells: the classes of calls, `[cells, dims]`; `cell` is the class of each size. corners: those of buckets.
    """

    def __init__(self, sizes: Integers, calls: Floats, axes: Sequence[int]) -> None:
        self._sizes, self._calls, self._axes = sizes, calls, list(axes)
        elements = calls * sizes.prod(axis=1)
        most = max(len(np.unique(sizes[:, axis])) for axis in axes)
        while True:
            self._floors = sizes.copy()
            for axis in axes:
                self._floors[:, axis] = levels(sizes[:, axis], elements, most, up=False)
            self.cells, self.cell = distinct(self._floors)
            if len(self.cells) <= CELLS or most <= 2:
                corners = _joins(self.cells, axes, PAIRS // len(self.cells))
                if corners is not None or most <= 2:
                    self.corners = self.cells if corners is None else corners
                    return
            most = min(most, 256) * 4 // 5 if most > 32 else most - 2

    def prices(self, cost: Cost) -> Floats:
        """`[corners, cells]`: what the calls of a class cost in a bucket of a class at least; infinite where it does
        not hold them."""
        order = np.argsort(self.cell, kind="stable")
        ends = np.searchsorted(self.cell[order], np.arange(len(self.cells) + 1))
        sums = np.bincount(self.cell, self._calls)
        above = costs_at(cost, self.corners)
        found = np.full((len(self.corners), len(self.cells)), math.inf)
        for n, corner in enumerate(self.corners):
            holds = held(corner, self.cells, self._axes)
            inner = holds & (corner[self._axes] > self.cells[:, self._axes]).all(axis=1)
            found[n, inner] = sums[inner] * above[n]  # the corner is above every call of the class
            edge = np.flatnonzero(holds & ~inner)
            rows = np.concatenate([order[ends[c] : ends[c + 1]] for c in edge.tolist()]) if edge.size else edge
            paid = costs_at(cost, np.maximum(self._sizes[rows], corner)) * self._calls[rows]
            found[n, edge] = np.bincount(self.cell[rows], paid, len(self.cells))[edge]
        return found

    def tops(self, corners: Integers) -> list[DimSizes]:
        """The largest buckets of these classes that the trace has sizes for."""
        found = corners.copy()
        for axis in self._axes:
            for n, level in enumerate(corners[:, axis]):
                found[n, axis] = self._sizes[self._floors[:, axis] == level, axis].max()
        return as_shapes(found)


def _joins(cells: Integers, axes: Sequence[int], most: int) -> Integers | None:
    """The joins of these classes, to which a bucket that is drawn in to its calls is rounded down. None for more than
    `most`, or where there are too many to look at."""
    exact = [axis for axis in range(cells.shape[1]) if axis not in axes]
    found: list[Integers] = []
    for own in grouped(cells, exact):
        names, places = zip(*(np.unique(column, return_inverse=True) for column in own.T), strict=True)
        if math.prod(map(len, names)) > PAIRS:
            return None
        present = np.zeros([*map(len, names)], np.bool_)
        present[places] = True
        # a corner is a join where, for each dim, a class that it holds has its size there
        joins = np.ones_like(present)
        for axis in range(present.ndim):
            below = present
            for other in {*range(present.ndim)} - {axis}:
                below = np.logical_or.accumulate(below, axis=other)
            joins &= below
        found.append(np.stack([name[place] for name, place in zip(names, np.nonzero(joins), strict=True)], axis=1))
        if sum(map(len, found)) > most:
            return None
    return np.concatenate(found)


def _raised(prices: Floats, ceilings: Floats, k: int, known: float) -> tuple[float, list[Integers]]:
    """The best bound of the subgradient steps, and what was open in the last STARTS of those that raised it."""
    least = prices.min(axis=0)
    # to begin with, offers in the proportion of the calls' own costs, that add up to the known cost
    offers = np.minimum(least * (known / least.sum()), ceilings)
    best, pace, idle = 0.0, 1.0, 0
    starts: list[Integers] = []
    each = np.empty_like(prices)
    for _ in range(STEPS):
        np.subtract(offers, prices, out=each)
        gains = np.maximum(each, 0, out=each).sum(axis=1)
        opened = np.argsort(-gains, kind="stable")[:k]
        value = float(offers.sum() - gains[opened].sum())
        if value > best * (1 + 1e-6):
            best, idle = value, 0
            starts.append(opened)
        else:
            idle += 1
            if idle == 5:
                pace, idle = pace / 2, 0
        slope = 1 - (prices[opened] < offers).sum(axis=0)
        # steps in proportion to the costs, which differ by orders of magnitude
        steep = float(slope * slope @ least)
        if best >= known * (1 - 1e-9) or steep == 0 or pace < 1e-3:
            break
        step = pace * max(known - value, 0.0) / steep
        offers = np.clip(offers + step * slope * least, 0, ceilings)
    return min(best, known), starts[-STARTS:]
