"""Several padded dims: buckets chosen greedily, and a cost that no buckets of their number can get below.

A bucket is the corner of a box from the origin and takes the calls in it. A call runs in the cheapest box that holds
it. To choose the cheapest `k` boxes is a k-median problem, which is NP-hard. Where choices are few, all are tried.
Otherwise each bucket is put where it saves most beside those before it, and at the end again beside all others.

Both work on calls rounded up to a grid of levels. The bound is of the same calls rounded down: buckets rounded down
with them hold the same calls and cost no more. For any prices `v` of the calls, every `k` buckets cost at least
`sum(v) - (the k largest of gain(b))`, where `gain(b)` sums `max(0, v(s) - cost(s, b))` over the calls that `b` holds.
Subgradient steps raise it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from aotc.tools.advise.arrays import (
    Floats,
    Integers,
    as_shapes,
    costs_at,
    distinct,
    grouped,
    held,
    levels,
    owners,
    table,
)
from aotc.tools.advise.costs import Cost
from aotc.tools.advise.trace import DimSizes

CORNERS = 1000
"""Corners at which a bucket is tried, about."""
CHOICES = 3000
"""Choices of all buckets but one, at most, where every choice is tried."""
ROUNDS = 2
"""How often each bucket is put again beside the others, at most."""
STEPS = 300


class Cover:
    """The buckets for one trace. `axes`: the padded dims. `spare`: as in `partition.cheapest`."""

    def __init__(
        self, counts: Mapping[DimSizes, int], cost: Cost, axes: Sequence[int], spare: Cost | None = None
    ) -> None:
        self._cost, self._axes = cost, axes
        self._sizes, self._calls = table(counts)
        self._spares = costs_at(spare, self._sizes) if spare else np.full(len(self._sizes), math.inf)
        self._above, self._below = (_Grid(self._sizes, self._calls, cost, axes, spare, up=up) for up in (True, False))

    def grown(self, most: int) -> Iterator[tuple[float, tuple[DimSizes, ...]]]:
        """The cost at most, and the buckets, for each number of them from 1 to `most`.

        The cost is infinite where so few cannot take every call. It ends where another bucket saves nothing.
        """
        chosen: list[int] = []
        while len(chosen) < most and (place := self._above.best_beside(chosen)) is not None:
            count = len(chosen) + 1
            chosen = self._above.best_of_all(count) if self._above.is_small(count) else [*chosen, place]
            boxes = self._above.boxes(chosen)
            yield self.total(boxes), tuple(boxes)

    def total(self, boxes: Sequence[DimSizes]) -> float:
        """The cost of all calls with these buckets."""
        boxes = sorted(boxes, key=self._cost)
        owner = owners(boxes, self._sizes, self._axes)
        prices = np.array([*map(self._cost, boxes), math.inf])[owner]
        return float(self._calls @ np.where(owner >= 0, prices, self._spares))

    def improved(self, boxes: Sequence[DimSizes]) -> tuple[tuple[DimSizes, ...], float]:
        """As many buckets or fewer, which cost at most as much as these of `grown`; and a cost that no buckets of
        their number can get below."""
        grid = self._above
        tried_all = grid.is_small(len(boxes))
        moved = boxes if tried_all else grid.boxes(grid.exchanged([grid.places[box] for box in boxes]))
        best = min((self._drawn_in(one) for one in (boxes, moved)), key=self.total)
        known = self.total(best)
        return best, known if tried_all and grid.is_exact else self._below.bound(len(boxes), known)

    def _drawn_in(self, boxes: Sequence[DimSizes]) -> tuple[DimSizes, ...]:
        """Each box cut down to the calls that run in it; boxes without a call are dropped. Again until none changes."""
        now = sorted({*boxes}, key=lambda box: (self._cost(box), box))
        while True:
            owner = owners(now, self._sizes, self._axes)
            drawn = {tuple(self._sizes[owner == n].max(axis=0).tolist()) for n in range(len(now)) if (owner == n).any()}
            after = sorted(drawn, key=lambda box: (self._cost(box), box))
            if after == now:
                return tuple(sorted(now))
            now = after


class _Grid:
    """The calls rounded to levels, and the corners at which a bucket is tried.

    places: the corners, and the index of each. is_exact: no size was rounded.
    """

    def __init__(
        self, sizes: Integers, calls: Floats, cost: Cost, axes: Sequence[int], spare: Cost | None, *, up: bool
    ) -> None:
        groups = grouped(sizes, [axis for axis in range(sizes.shape[1]) if axis not in axes])
        each = max(3, math.ceil((CORNERS / len(groups)) ** (1 / len(axes))))
        elements, rounded = calls * sizes.prod(axis=1), sizes.copy()
        for axis in axes:
            rounded[:, axis] = levels(sizes[:, axis], elements, each, up=up)
        self.is_exact = np.array_equal(rounded, sizes)
        cells, cell = distinct(rounded)
        corners = _corners(cells, axes)
        self.places = {corner: n for n, corner in enumerate(as_shapes(corners))}
        prices = np.bincount(cell, calls) * costs_at(cost, corners)[:, None]
        for n, corner in enumerate(corners):
            prices[n, ~held(corner, cells, axes)] = math.inf
            # a call of a level rounded down is larger than the corner, and so is every bucket that holds it
            rows = np.flatnonzero((sizes > corner).any(axis=1) & held(corner, rounded, axes))
            extra = costs_at(cost, np.maximum(sizes[rows], corner)) - cost(tuple(corner.tolist()))
            prices[n] += np.bincount(cell[rows], extra * calls[rows], len(cells))
        self._prices, self._buffer = prices, np.empty_like(prices)
        """What the calls of a cell cost in a bucket at a corner, `[corners, cells]`; infinite where it does not hold
        them."""
        ceilings = calls * costs_at(spare, sizes) if spare else np.full(len(sizes), math.inf)
        self._ceilings = np.bincount(cell, ceilings)
        # so much that a call without a bucket outweighs all that others can save
        self._alone = (
            self._ceilings
            if spare
            else np.full(len(cells), 2 * float(prices.max(axis=0, where=np.isfinite(prices), initial=0).sum()))
        )

    def boxes(self, chosen: Sequence[int]) -> list[DimSizes]:
        every = [*self.places]
        return [every[place] for place in chosen]

    def best_beside(self, chosen: Sequence[int]) -> int | None:
        """The corner where one more bucket saves most; None if none does."""
        now = self._prices[chosen].min(axis=0, initial=math.inf)
        saved = self._saved(now)
        place = int(np.argmax(saved))
        return place if saved[place] > 0 else None

    def _saved(self, now: Floats) -> Floats:
        """What one bucket more saves at each corner, beside buckets in which the calls cost `now`."""
        gains = np.subtract(now, self._prices, out=self._buffer, where=np.isfinite(now))
        np.maximum(gains, 0, out=gains)
        # a call that no bucket holds moves into the new one at any cost, as the loader's rule has it
        free = np.flatnonzero(np.isinf(now))
        own = self._prices[:, free]
        gains[:, free] = np.where(np.isinf(own), 0, self._alone[free] - own)
        saved: Floats = gains.sum(axis=1)
        return saved

    def is_small(self, count: int) -> bool:
        """Whether every choice of so many buckets can be tried."""
        return math.comb(len(self._prices), count - 1) <= CHOICES

    def best_of_all(self, count: int) -> list[int]:
        """The cheapest buckets of every choice of so many."""
        return min(self._choices(count, 0, np.full(len(self._alone), math.inf)), key=lambda found: found[0])[1]

    def _choices(self, count: int, first: int, now: Floats) -> Iterator[tuple[float, list[int]]]:
        if count == 1 or first >= len(self._prices) - 1:
            saved = self._saved(now)
            place = int(np.argmax(saved))
            yield float(np.where(np.isinf(now), self._alone, now).sum() - saved[place]), [place]
            return
        for place in range(first, len(self._prices)):
            for total, others in self._choices(count - 1, place + 1, np.minimum(now, self._prices[place])):
                yield total, [place, *others]

    def exchanged(self, chosen: list[int]) -> list[int]:
        """Each bucket in turn taken away and put where it saves most, until none moves."""
        for _ in range(ROUNDS):
            before = list(chosen)
            for n in range(len(chosen)):
                place = self.best_beside(chosen[:n] + chosen[n + 1 :])
                chosen[n] = chosen[n] if place is None else place
            if chosen == before:
                break
        return chosen

    def bound(self, count: int, known: float) -> float:
        """A cost that no `count` buckets get below, of which `known` is that of some."""
        prices, ceilings = self._prices, self._ceilings
        least = np.minimum(prices.min(axis=0), ceilings)
        best = ideal = float(least.sum())
        # to begin with, offers in the proportion of the calls' own costs, that add up to the known cost
        offers, pace, idle = np.minimum(least * (known / ideal), ceilings), 1.0, 0
        for _ in range(STEPS):
            each = np.subtract(offers, prices, out=self._buffer)
            gains = np.maximum(each, 0, out=each).sum(axis=1)
            opened = np.argsort(-gains, kind="stable")[:count]
            value = float(offers.sum() - gains[opened].sum())
            best, idle = (value, 0) if value > best * (1 + 1e-6) else (best, idle + 1)
            if idle == 5:
                pace, idle = pace / 2, 0
            slope = 1 - (prices[opened] < offers).sum(axis=0)
            # steps in proportion to the costs, which differ by orders of magnitude
            steep = float(slope * slope @ least)
            if best >= known * (1 - 1e-9) or steep == 0 or pace < 1e-3:
                break
            offers = np.clip(offers + pace * max(known - value, 0.0) / steep * slope * least, 0, ceilings)
        return min(best, known)


def _corners(cells: Integers, axes: Sequence[int]) -> Integers:
    """Corners of the calls themselves and of pairs of their levels, each drawn in to the calls that it holds."""
    found: dict[DimSizes, None] = {}
    for sizes in grouped(cells, [axis for axis in range(cells.shape[1]) if axis not in axes]):
        for corner in product(*(np.unique(column).tolist() for column in sizes.T)):
            inside = (sizes <= np.array(corner)).all(axis=1)
            if inside.any():
                found[tuple(sizes[inside].max(axis=0).tolist())] = None
    return np.array(list(found))
