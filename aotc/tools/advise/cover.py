"""Several padded dims: good buckets, found by greedy addition and local search.

A bucket is the corner of a box from the origin and takes the calls in it. A call runs in the cheapest box that holds
it. To choose the cheapest `k` boxes is a k-median problem, which is NP-hard, so this is a heuristic; `bound` says how
far from the optimum it can be at most. The result is the same in every run: effort is counted, not timed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from aotc.tools.advise.arrays import (
    Floats,
    Integers,
    Mask,
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

SEARCHED = 1000
"""Distinct sizes that the search works on; more are rounded up to fewer levels first, and buckets shrunk at the end."""
CORNERS = 1000
"""Corners at which a bucket is tried."""
EXCHANGES = 3
"""Buckets that are tried elsewhere, the one that is missed least first, before a search ends."""


class Cover:
    """The search for one trace. `axes`: the padded dims. `spare`: as in `partition.cheapest`."""

    def __init__(
        self, counts: Mapping[DimSizes, int], cost: Cost, axes: Sequence[int], spare: Cost | None = None
    ) -> None:
        self._cost, self._axes = cost, axes
        self._sizes, self._calls = table(counts)
        self._spares = costs_at(spare, self._sizes) if spare else np.full(len(self._sizes), math.inf)
        self._search = _Search(*_rounded_up(self._sizes, self._calls, axes, SEARCHED), self._cost, axes, spare)

    def grown(self, most: int) -> Iterator[tuple[float, tuple[DimSizes, ...]]]:
        """The cost at most, and the buckets, for each number of them from 1 to `most`.

        The cost is infinite where so few cannot take every call. It ends where another bucket saves nothing.
        """
        while len(self._search.boxes) < most and self._search.grow():
            yield self._search.total(), tuple(self._search.boxes)

    def total(self, boxes: Sequence[DimSizes]) -> float:
        """The cost of all calls with these buckets."""
        boxes = sorted(boxes, key=self._cost)
        owner = owners(boxes, self._sizes, self._axes)
        prices = np.array([*map(self._cost, boxes), math.inf])[owner]
        return float(self._calls @ np.where(owner >= 0, prices, self._spares))

    def improved(self, starts: Sequence[Sequence[DimSizes]]) -> tuple[DimSizes, ...]:
        """The best that local search makes of any of these sets of buckets, each bucket drawn in to its calls."""
        best = min((self._search.improve(start) for start in starts), key=lambda found: found[0])[1]
        return _shrunk(best, self._sizes, self._cost, self._axes)


def _rounded_up(sizes: Integers, calls: Floats, axes: Sequence[int], limit: int) -> tuple[Integers, Floats]:
    """At most about `limit` sizes that hold the given ones, with their calls: each padded dim is rounded up to so many
    levels, which divide the elements of the trace evenly."""
    found, sums, share = sizes, calls, 256
    elements = calls * sizes.prod(axis=1)
    while len(found) > limit and share > 2:
        rounded = sizes.copy()
        for axis in axes:
            rounded[:, axis] = levels(sizes[:, axis], elements, share, up=True)
        found, place = distinct(rounded)
        sums = np.bincount(place, calls).astype(np.float64)
        share = share * 4 // 5
    return found, sums


def _shrunk(boxes: Sequence[DimSizes], sizes: Integers, cost: Cost, axes: Sequence[int]) -> tuple[DimSizes, ...]:
    """Each box cut down to the calls that run in it; boxes without a call are dropped. Again until nothing changes."""
    now = sorted({*boxes}, key=lambda box: (cost(box), box))
    while True:
        owner = owners(now, sizes, axes)
        drawn = {tuple(sizes[owner == n].max(axis=0).tolist()) for n in range(len(now)) if (owner == n).any()}
        after = sorted(drawn, key=lambda box: (cost(box), box))
        if after == now:
            return tuple(sorted(now))
        now = after


class _Search:
    """Boxes, and for each call the cost of the best two that hold it."""

    def __init__(self, sizes: Integers, calls: Floats, cost: Cost, axes: Sequence[int], spare: Cost | None) -> None:
        self._sizes, self._calls = sizes, calls
        self._cost, self._axes = functools.cache(cost), axes
        self._exact = [axis for axis in range(sizes.shape[1]) if axis not in axes]
        self._spares = costs_at(spare, sizes) if spare else np.full(len(sizes), math.inf)
        self._must = np.isinf(self._spares)
        """Calls that need a box."""
        self._orders = {axis: np.argsort(sizes[:, axis], kind="stable") for axis in axes}
        corners = self._corner_list()
        self._corners = as_shapes(corners)
        self._costs, self._alone = costs_at(cost, corners), costs_at(cost, sizes)
        self._inside = np.array([held(corner, sizes, axes) for corner in corners])
        self._gains = np.empty(self._inside.shape)
        self.boxes: list[DimSizes] = []
        self._assign()

    def _corner_list(self) -> Integers:
        """Corners of the calls themselves and of pairs of their levels, each drawn in to the calls that it holds."""
        groups = grouped(self._sizes, self._exact)
        each = max(3, math.ceil((CORNERS / len(groups)) ** (1 / len(self._axes))))
        found: dict[DimSizes, None] = {}
        for sizes in groups:
            for corner in product(*(_thinned(np.unique(column), each) for column in sizes.T)):
                inside = (sizes <= np.array(corner)).all(axis=1)
                if inside.any():
                    found[tuple(sizes[inside].max(axis=0).tolist())] = None
        return np.array(list(found))

    # -- moves ---------------------------------------------------------------------------------------------------------

    def grow(self) -> bool:
        """One box more, at the best corner, and the boxes that lost calls to it moved. False if none helps."""
        return self._add(1)

    def _add(self, rounds: int, orphans: Sequence[int] = ()) -> bool:
        """A box at the best corner. Then it and those that lost calls to it are moved, and these others."""
        position = self._best_corner()
        if position is None:
            return False
        before = self._owner
        self.boxes.append(self._corners[position])
        self._assign()
        new = len(self.boxes) - 1
        self._descend(rounds, {*orphans, *before[self._owner == new].tolist(), new} - {-1})
        return True

    def improve(self, start: Sequence[DimSizes]) -> tuple[float, tuple[DimSizes, ...]]:
        """The cost and the boxes after local search from a start, which is first made to take every call."""
        self.boxes = list(start)
        self._assign()
        while (untaken := np.flatnonzero(np.isinf(self._first))).size:
            costs = self._alone[untaken]
            self._take_in(as_shapes(self._sizes[untaken[[np.argmax(costs)]]])[0])
            self._assign()
        self._descend()
        self._exchange()
        return self.total(), tuple(self.boxes)

    def _take_in(self, shape: DimSizes) -> None:
        """Enlarge the box for which it costs least, so that it holds a call."""
        fitting = [n for n, box in enumerate(self.boxes) if all(box[axis] == shape[axis] for axis in self._exact)]
        joins = {n: tuple(map(max, self.boxes[n], shape)) for n in fitting}
        if not joins:
            self.boxes.append(shape)
            return
        least = min(joins, key=lambda n: self._cost(joins[n]) - self._cost(self.boxes[n]))
        self.boxes[least] = joins[least]

    def total(self) -> float:
        return float(self._calls @ self._first)

    def _assign(self) -> None:
        """`_prices[box, call]` is the box's cost where it holds the call, else infinite."""
        rows = [self._row(box) for box in self.boxes]
        self._prices = np.array(rows) if rows else np.empty((0, len(self._sizes)))
        self._choose()

    def _reassign(self, box: int) -> None:
        self._prices[box] = self._row(self.boxes[box])
        self._choose()

    def _row(self, box: DimSizes) -> Floats:
        return np.where(held(np.array(box), self._sizes, self._axes), self._cost(box), math.inf)

    def _choose(self) -> None:
        every = np.arange(len(self._sizes))
        if not len(self._prices):
            self._owner, self._first, self._second = np.full(len(every), -1), self._spares, self._spares
            return
        owner = self._prices.argmin(axis=0)
        first = self._prices[owner, every]
        self._prices[owner, every] = math.inf
        second = self._prices.min(axis=0)
        self._prices[owner, every] = first
        taken = np.isfinite(first)
        self._owner = np.where(taken, owner, -1)
        self._first = np.where(taken, first, self._spares)
        self._second = np.where(np.isfinite(second), second, self._spares)

    def _best_corner(self) -> int | None:
        """The corner where one more box saves most."""
        uncovered = np.isinf(self._first)
        if uncovered.any():  # first take every call: the most weight, each at its own cost
            saved = (self._inside[:, uncovered] @ self._calls[uncovered]) * 1e9 - self._costs
        else:
            gains = np.subtract(self._first, self._costs[:, None], out=self._gains)
            np.maximum(gains, 0, out=gains)
            if (free := np.flatnonzero(self._owner < 0)).size:  # without an owner a call moves in at any cost
                gains[:, free] = self._first[free] - self._costs[:, None]
            gains *= self._inside
            saved = gains @ self._calls
        position = int(np.argmax(saved))
        return position if saved[position] > 0 else None

    def _descend(self, rounds: int = 6, boxes: Collection[int] = ()) -> None:
        """Move one coordinate of one box at a time to its best place; in later rounds of those boxes that a move has
        given calls or taken them from."""
        near = {*(boxes or range(len(self.boxes)))}
        for _ in range(rounds):
            touched: set[int] = set()
            for box in sorted(near):
                for axis in self._axes:
                    before = self._owner
                    if self._move(box, axis):
                        changed = before != self._owner
                        touched |= {box, *before[changed].tolist(), *self._owner[changed].tolist()}
            near = touched - {-1}
            if not near:
                return

    def _move(self, box: int, axis: int) -> bool:
        """Move one coordinate of a box to its best place, all else as it is. False if it is there."""
        old = self.boxes[box]
        order = self._orders[axis]
        wide = np.array((*old[:axis], self._sizes[order[-1], axis], *old[axis + 1 :]))
        calls = order[held(wide, self._sizes[order], self._axes)]
        if not calls.size:
            return False
        sizes, weights = self._sizes[calls, axis], self._calls[calls]
        others = np.where(self._owner[calls] == box, self._second[calls], self._first[calls])
        forced: Mask = np.isinf(others) | (~self._must[calls] & (others == self._spares[calls]))
        least = int(sizes[np.isinf(others)].max(initial=0))
        last = np.flatnonzero(np.diff(sizes, append=sizes[-1] + 1))
        last = last[sizes[last] >= least]
        here = np.array([self._cost((*old[:axis], size, *old[axis + 1 :])) for size in sizes[last].tolist()])
        # a call that costs nothing else than infinity must be taken: it counts the same at every place
        gains = np.where(np.isinf(others), 0, others) - here[:, None]
        np.maximum(gains, 0, out=gains, where=~forced)
        saved = np.where(np.arange(len(calls)) <= last[:, None], gains, 0) @ weights
        best = int(np.argmax(saved))
        place = int(sizes[last[best]])
        if (saved[best] <= 0 and not least) or place == old[axis]:
            return False
        self.boxes[box] = (*old[:axis], place, *old[axis + 1 :])
        self._reassign(box)
        return True

    def _exchange(self) -> None:
        """Take the box away that is missed least, and put one where it saves most, as long as that is cheaper."""
        if len(self.boxes) < 3:
            return
        tries = EXCHANGES
        while tries:
            kept, before = list(self.boxes), self.total()
            owned = self._owner >= 0
            loss = self._calls[owned] * (self._second[owned] - self._first[owned])
            missed = np.bincount(self._owner[owned], loss, len(kept))
            order = np.argsort(missed, kind="stable")
            box = int(order[min(EXCHANGES - tries, len(order) - 1)])
            if math.isinf(missed[box]):
                return
            orphaned = self._owner == box
            del self.boxes[box]
            self._assign()
            added = self._add(2, self._owner[orphaned].tolist())
            if added and self.total() < before * (1 - 1e-9):
                tries = EXCHANGES
                continue
            self.boxes = kept
            self._assign()
            tries -= 1


def _thinned(sizes: Integers, most: int) -> list[int]:
    """At most so many of the sizes, evenly, with the largest."""
    step = max(1.0, len(sizes) / most)
    return sorted({int(sizes[len(sizes) - 1 - int(n * step)]) for n in range(min(most, len(sizes)))})
