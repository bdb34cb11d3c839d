"""Several padded dims: good buckets, found by greedy addition and local search.

A bucket is the corner of a box from the origin and takes the calls in it. A call runs in the cheapest box that holds
it. To choose the cheapest `k` boxes is a k-median problem, which is NP-hard, so this is a heuristic; `bound` says how
far from the optimum it can be at most. The result is the same in every run: effort is counted, not timed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from aotc.advise.costs import Cost
from aotc.advise.trace import Shape

SEARCHED = 500
"""Distinct sizes that the search works on; more are rounded up to fewer levels first, and buckets shrunk at the end."""
CORNERS = 700
"""Corners at which a bucket is tried."""
EXCHANGES = 3
"""Buckets that are tried elsewhere, the one that is missed least first, before a search ends."""


class Cover:
    """The search for one trace. `axes`: the padded dims. `spare`: as in `partition.cheapest`."""

    def __init__(self, counts: Mapping[Shape, int], cost: Cost, axes: Sequence[int], spare: Cost | None = None) -> None:
        self._counts, self._cost, self._axes = counts, cost, axes
        self._search = _Search(_rounded_up(counts, axes, SEARCHED), cost, axes, spare)

    def grown(self, most: int) -> Iterator[tuple[float, tuple[Shape, ...]]]:
        """The cost at most, and the buckets, for each number of them from 1 to `most`.

        The cost is infinite where so few cannot take every call. It ends where another bucket saves nothing.
        """
        while len(self._search.boxes) < most and self._search.grow():
            yield self._search.total(), tuple(self._search.boxes)

    def improved(self, starts: Sequence[Sequence[Shape]]) -> tuple[Shape, ...]:
        """The best that local search makes of any of these sets of buckets, each bucket drawn in to its calls."""
        best = min((self._search.improve(start) for start in starts), key=lambda found: found[0])[1]
        return _shrunk(best, sorted(self._counts), self._cost, self._axes)


def _rounded_up(counts: Mapping[Shape, int], axes: Sequence[int], limit: int) -> dict[Shape, int]:
    """At most about `limit` sizes that hold the given ones: each padded dim is rounded up to so many levels."""
    found, share = dict(counts), 256
    while len(found) > limit and share > 2:
        levels = {axis: _levels(counts, axis, share) for axis in axes}
        found = defaultdict(int)
        for shape, count in counts.items():
            found[tuple([levels[a][size] if a in levels else size for a, size in enumerate(shape)])] += count
        share = share * 2 // 3
    return dict(found)


def _levels(counts: Mapping[Shape, int], axis: int, most: int) -> dict[int, int]:
    """For each size of a dim the level that holds it. Levels divide the elements of the trace evenly."""
    weights: dict[int, int] = defaultdict(int)
    for shape, count in counts.items():
        weights[shape[axis]] += count * math.prod(shape)
    share, filled, waiting, found = sum(weights.values()) / most, 0.0, [], {}
    largest = max(weights)
    for size in sorted(weights):
        filled += weights[size]
        waiting.append(size)
        if filled >= share or size == largest:
            found.update(dict.fromkeys(waiting, size))
            filled, waiting = 0.0, []
    return found


def holder(rank: int, axes: Sequence[int]) -> Callable[[Shape, Shape], bool]:
    """A function that tells whether a box holds a call: a box of these sizes, to which the call is padded in `axes`."""
    exact = [axis for axis in range(rank) if axis not in axes]
    if rank == 2 and not exact:  # the innermost loop of the search
        return lambda box, shape: box[0] >= shape[0] and box[1] >= shape[1]
    return lambda box, shape: all(map(int.__ge__, box, shape)) and all(box[axis] == shape[axis] for axis in exact)


def _shrunk(boxes: Sequence[Shape], shapes: Sequence[Shape], cost: Cost, axes: Sequence[int]) -> tuple[Shape, ...]:
    """Each box cut down to the calls that run in it; boxes without a call are dropped. Again until nothing changes."""
    holds = holder(len(shapes[0]), axes)
    now = sorted({*boxes}, key=cost)
    while True:
        joined: dict[Shape, Shape] = {}
        for shape in shapes:
            for box in now:
                if holds(box, shape):
                    joined[box] = tuple(map(max, joined.get(box, shape), shape))
                    break
        after = sorted({*joined.values()}, key=cost)
        if after == now:
            return tuple(sorted(now))
        now = after


class _Search:
    """Boxes, and for each call the cost of the best two that hold it."""

    def __init__(self, counts: Mapping[Shape, int], cost: Cost, axes: Sequence[int], spare: Cost | None) -> None:
        self._shapes = sorted(counts)
        self._weights = [counts[shape] for shape in self._shapes]
        self._cost, self._axes, self._spare = cost, axes, spare
        self._holds = holder(len(self._shapes[0]), axes)
        self._exact = [axis for axis in range(len(self._shapes[0])) if axis not in axes]
        self._spares = [spare(shape) if spare else math.inf for shape in self._shapes]
        self._costs_alone = [cost(shape) for shape in self._shapes]
        self._corners = self._corner_list()
        self._inside = [
            [n for n, shape in enumerate(self._shapes) if self._holds(corner, shape)] for corner in self._corners
        ]
        self._costs = [cost(corner) for corner in self._corners]
        self.boxes: list[Shape] = []
        self.first: list[float] = list(self._spares)
        self._owner = [-1] * len(self._shapes)
        self._second: list[float] = list(self._spares)

    def _corner_list(self) -> list[Shape]:
        """Corners of the calls themselves and of pairs of their levels, each drawn in to the calls that it holds."""
        groups: dict[Shape, list[Shape]] = defaultdict(list)
        for shape in self._shapes:
            groups[tuple(shape[axis] for axis in self._exact)].append(shape)
        found: dict[Shape, None] = {}
        each = max(3, math.ceil((CORNERS / len(groups)) ** (1 / len(self._axes))))
        for shapes in groups.values():
            columns = list(zip(*shapes, strict=True))
            for corner in product(*(_thinned(sorted({*column}), each) for column in columns)):
                if inside := [shape for shape in shapes if all(map(int.__ge__, corner, shape))]:
                    found[tuple(map(max, zip(*inside, strict=True)))] = None
        return list(found)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def grow(self) -> bool:
        """One box more, at the best corner, and all boxes moved to where they cost least. False if none helps."""
        position = self._best_corner()
        if position is None:
            return False
        self.boxes.append(self._corners[position])
        self._assign()
        self._descend(1)
        return True

    def improve(self, start: Sequence[Shape]) -> tuple[float, tuple[Shape, ...]]:
        """The cost and the boxes after local search from a start, which is first made to take every call."""
        self.boxes = list(start)
        self._assign()
        while self.total() == math.inf:
            worst = max(
                (n for n, cost in enumerate(self.first) if cost == math.inf), key=lambda n: self._costs_alone[n]
            )
            self._take_in(self._shapes[worst])
            self._assign()
        self._descend()
        self._exchange()
        return self.total(), tuple(self.boxes)

    def _take_in(self, shape: Shape) -> None:
        """Enlarge the box for which it costs least, so that it holds a call."""
        fitting = [n for n, box in enumerate(self.boxes) if all(box[axis] == shape[axis] for axis in self._exact)]
        joins = {n: tuple(map(max, self.boxes[n], shape)) for n in fitting}
        if not joins:
            self.boxes.append(shape)
            return
        least = min(joins, key=lambda n: self._cost(joins[n]) - self._cost(self.boxes[n]))
        self.boxes[least] = joins[least]

    def total(self) -> float:
        return sum([weight * cost for weight, cost in zip(self._weights, self.first, strict=True)])

    def _assign(self) -> None:
        order = sorted(range(len(self.boxes)), key=lambda n: self._cost(self.boxes[n]))
        costs = [self._cost(box) for box in self.boxes]
        for n, shape in enumerate(self._shapes):
            self.first[n] = self._second[n] = self._spares[n]
            self._owner[n] = -1
            for box in order:
                if self._holds(self.boxes[box], shape):
                    if self._owner[n] < 0:
                        self._owner[n], self.first[n] = box, costs[box]
                    else:
                        self._second[n] = costs[box]
                        break

    def _best_corner(self) -> int | None:
        """The corner where one more box saves most."""
        first, weights, best, found = self.first, self._weights, 0.0, None
        uncovered = any(cost == math.inf for cost in first)
        for position, inside in enumerate(self._inside):
            here = self._costs[position]
            if uncovered:  # first take every call: the most weight, each at its own cost
                saved = sum(weights[n] for n in inside if first[n] == math.inf) * 1e9 - here
            else:
                saved = sum([weights[n] * (first[n] - here) for n in inside if first[n] > here or self._owner[n] < 0])
            if saved > best:
                best, found = saved, position
        return found

    def _descend(self, rounds: int = 6) -> None:
        """Move one coordinate of one box at a time to its best place, until no move saves anything."""
        for _ in range(rounds):
            before = self.total()
            for box in range(len(self.boxes)):
                for axis in self._axes:
                    self._move(box, axis)
            if not self.total() < before * (1 - 1e-9):
                return

    def _move(self, box: int, axis: int) -> None:
        """The best place of one coordinate of a box, all else as it is."""
        old = self.boxes[box]
        open_box = (*old[:axis], max(shape[axis] for shape in self._shapes), *old[axis + 1 :])
        others = [
            (shape[axis], self._second[n] if self._owner[n] == box else self.first[n], n)
            for n, shape in enumerate(self._shapes)
            if self._holds(open_box, shape)
        ]
        if not others:
            return
        others.sort()
        least = max((size for size, other, _ in others if other == math.inf), default=0)
        levels: dict[float, int] = defaultdict(int)  # the calls below the coordinate, by what they cost elsewhere
        free_weight = 0
        free_cost = 0.0
        best, place = (0.0, None) if least == 0 else (-math.inf, None)
        for position, (size, other, n) in enumerate(others):
            weight = self._weights[n]
            if other == self._spares[n] and self._spare is not None:
                free_weight, free_cost = free_weight + weight, free_cost + weight * other
            else:
                levels[other] += weight
            if size < least or (position + 1 < len(others) and others[position + 1][0] == size):
                continue
            here = self._cost((*old[:axis], size, *old[axis + 1 :]))
            # a call that costs nothing else than infinity must be taken: it counts the same at every place
            saved = sum([w * ((0 if cost == math.inf else cost) - here) for cost, w in levels.items() if cost > here])
            saved += free_cost - free_weight * here
            if saved > best:
                best, place = saved, size
        if place is not None and place != old[axis]:
            self.boxes[box] = (*old[:axis], place, *old[axis + 1 :])
            self._assign()

    def _exchange(self) -> None:
        """Take the box away that is missed least, and put one where it saves most, as long as that is cheaper."""
        if len(self.boxes) < 3:
            return
        tries = EXCHANGES
        while tries:
            kept, before = list(self.boxes), self.total()
            missed = [0.0] * len(kept)
            for n, owner in enumerate(self._owner):
                if owner >= 0:
                    missed[owner] += self._weights[n] * (self._second[n] - self.first[n])
            order = sorted(range(len(kept)), key=missed.__getitem__)
            box = order[min(EXCHANGES - tries, len(order) - 1)]
            if missed[box] == math.inf:
                return
            del self.boxes[box]
            self._assign()
            position = self._best_corner()
            if position is not None:
                self.boxes.append(self._corners[position])
                self._assign()
                self._descend(2)
            if position is not None and self.total() < before * (1 - 1e-9):
                tries = EXCHANGES
                continue
            self.boxes = kept
            self._assign()
            tries -= 1


def _thinned(sizes: Sequence[int], most: int) -> list[int]:
    """At most so many of the sizes, evenly, with the largest."""
    step = max(1.0, len(sizes) / most)
    return sorted({sizes[len(sizes) - 1 - int(n * step)] for n in range(min(most, len(sizes)))})
