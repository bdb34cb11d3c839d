"""One padded dim: the cheapest buckets, found by dynamic programming.

Within a group of calls that agree in every other dim, a call runs in the smallest bucket that holds it, so buckets cut
the sorted sizes into intervals, each at the cost of its largest size. With `W(j)` the calls of the first `j` sizes:

    f(k, j) = min over i < j of f(k-1, i) + cost(j) · (W(j) - W(i))

For a fixed `k` the terms are lines in `cost(j)` whose slopes fall with `i`, and `cost(j)` never falls with `j`: one
pass along their lower envelope gives all `f(k, j)` (the convex hull trick), so `k` buckets of `n` sizes take O(k·n).

With a limit, the calls at and below it are a group of their own. Groups share the buckets: a second pass over the
groups, min-plus, gives each its number.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence

from aotc.tools.advise.costs import Cost
from aotc.tools.advise.trace import DimSizes

INFINITE = math.inf


def cheapest(
    counts: Mapping[DimSizes, int],
    cost: Cost,
    axis: int | None,
    most: int,
    spare: Cost | None = None,
    limit: float | None = None,
) -> list[tuple[float, tuple[DimSizes, ...]]]:
    """For each number of buckets from 0 to `most`, the least cost of all calls with at most so many, and the buckets.

    axis: the dim that is padded; None for none. spare: what a call costs that no bucket takes, in a range; None where
    every call needs a bucket. limit: calls that cost at most this get no bucket that costs more. The cost is infinite
    where so few buckets cannot take every call.
    """
    groups: dict[tuple[DimSizes, bool], list[DimSizes]] = defaultdict(list)
    for shape in sorted(counts):
        others = shape if axis is None else shape[:axis] + shape[axis + 1 :]
        groups[others, limit is not None and cost(shape) <= limit].append(shape)
    columns = [_Column(shapes, counts, cost, most, spare) for shapes in groups.values()]
    best = [0.0] * (most + 1)
    taken: list[array[int]] = []
    for column in columns:
        best, choice = _added(best, column.totals)
        taken.append(choice)
    return [(total, _buckets(columns, taken, k) if total < INFINITE else ()) for k, total in enumerate(best)]


def _added(best: Sequence[float], totals: Sequence[float]) -> tuple[list[float], array[int]]:
    """The costs with one group more, and for each number of buckets how many of them this group has."""
    sums, choice = [], array("l")
    for k in range(len(best)):
        value, own = min((best[k - own] + totals[own], own) for own in range(min(k, len(totals) - 1) + 1))
        sums.append(value)
        choice.append(own)
    return sums, choice


def _buckets(columns: Sequence[_Column], taken: Sequence[array[int]], k: int) -> tuple[DimSizes, ...]:
    found: list[DimSizes] = []
    for column, choice in zip(reversed(columns), reversed(taken), strict=True):
        own = choice[k]
        found += column.buckets(own)
        k -= own
    return tuple(sorted(found))


class _Column:
    """The calls of one group by rising size. `totals[k]` is the least cost with `k` buckets."""

    def __init__(
        self, shapes: Sequence[DimSizes], counts: Mapping[DimSizes, int], cost: Cost, most: int, spare: Cost | None
    ) -> None:
        self._shapes = shapes
        n = len(shapes)
        costs = [cost(shape) for shape in shapes]
        calls = [0]
        for shape in shapes:
            calls.append(calls[-1] + counts[shape])
        rest = [0.0 if spare else INFINITE] * n + [0.0]  # the cost of the sizes from j on, in the range
        if spare:
            for j in range(n - 1, -1, -1):
                rest[j] = rest[j + 1] + counts[shapes[j]] * spare(shapes[j])
        self.totals = [rest[0]]
        self._ends = [0]
        self._choices: list[array[int]] = []
        before = [0.0] + [INFINITE] * n
        for _ in range(min(most, n)):
            before, choice = _layer(before, costs, calls)
            self._choices.append(choice)
            end = min(range(n + 1), key=lambda j: before[j] + rest[j])
            self.totals.append(before[end] + rest[end])
            self._ends.append(end)

    def buckets(self, count: int) -> list[DimSizes]:
        found, j = [], self._ends[count]
        for choice in reversed(self._choices[:count]):
            if j == 0:
                break
            found.append(self._shapes[j - 1])
            j = choice[j]
        return found


def _layer(before: Sequence[float], costs: Sequence[float], calls: Sequence[int]) -> tuple[list[float], array[int]]:
    """f(k, ·) from f(k-1, ·), and for each j the i that gives it. An f of no calls stays 0."""
    after, choice = [before[0]], array("l", [0])
    lines: list[int] = []  # the lower envelope: indexes i of lines f(k-1, i) - calls[i] · x, by falling slope
    first = 0
    for j, x in enumerate(costs, 1):
        i = j - 1
        if before[i] < INFINITE:
            while len(lines) - first >= 2 and _is_hidden(before, calls, lines[-2], lines[-1], i):
                lines.pop()
            lines.append(i)
        while len(lines) - first >= 2 and (
            before[lines[first + 1]] - calls[lines[first + 1]] * x <= before[lines[first]] - calls[lines[first]] * x
        ):
            first += 1
        i = lines[first]
        after.append(before[i] + x * (calls[j] - calls[i]))
        choice.append(i)
    return after, choice


def _is_hidden(before: Sequence[float], calls: Sequence[int], a: int, b: int, c: int) -> bool:
    """Whether line b is above a or above c everywhere: c crosses a no later than b does."""
    return (before[c] - before[a]) * (calls[b] - calls[a]) <= (before[b] - before[a]) * (calls[c] - calls[a])
