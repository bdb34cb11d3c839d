"""Sizes as arrays of numpy: a row for each distinct size, a column for each dim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from aotc.tools.advise.costs import Cost, elements
from aotc.tools.advise.trace import DimSizes

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def table(counts: Mapping[DimSizes, int]) -> tuple[Integers, Floats]:
    """The distinct sizes in rising order, `[sizes, dims]`, and how many calls had each, `[sizes]`."""
    shapes = sorted(counts)
    return np.array(shapes, np.int64).reshape(len(shapes), -1), np.array([counts[one] for one in shapes], np.float64)


def as_shapes(sizes: Integers) -> list[DimSizes]:
    return [tuple(row) for row in sizes.tolist()]


def distinct(sizes: Integers) -> tuple[Integers, Integers]:
    """The distinct rows in rising order, and for each row which of them it is."""
    codes = np.zeros(len(sizes), np.int64)
    room = 1
    for column in sizes.T:
        span = int(column.max(initial=0)) + 1
        room *= span
        codes = codes * span + column
    if room >= 1 << 62:
        rows, place = np.unique(sizes, axis=0, return_inverse=True)
        return rows, place.ravel()
    _, first, place = np.unique(codes, return_index=True, return_inverse=True)
    return sizes[first], place


def costs_at(cost: Cost, sizes: Integers) -> Floats:
    """The cost at each row. It is computed once for equal rows."""
    if cost in (math.prod, elements):
        products: Floats = sizes.prod(axis=1).astype(np.float64)
        return products
    rows, place = distinct(sizes)
    found: Floats = np.array([cost(shape) for shape in as_shapes(rows)], np.float64)[place]
    return found


def held(box: Integers, sizes: Integers, axes: Sequence[int]) -> Mask:
    """Which rows of `sizes` run in a box: they are padded to it in `axes`, and equal to it in the other dims."""
    found = np.ones(len(sizes), np.bool_)
    for axis in range(sizes.shape[1]):
        found &= sizes[:, axis] <= box[axis] if axis in axes else sizes[:, axis] == box[axis]
    return found


def owners(boxes: Sequence[DimSizes], sizes: Integers, axes: Sequence[int]) -> Integers:
    """For each row the index of the first box that holds it; -1 where none does."""
    owner = np.full(len(sizes), -1)
    for n, box in enumerate(boxes):
        free = np.flatnonzero(owner < 0)
        if not free.size:
            break
        owner[free[held(np.array(box), sizes[free], axes)]] = n
    return owner


def levels(column: Integers, weights: Floats, most: int, *, up: bool) -> Integers:
    """For each row, the level of its size in one dim: the largest size of the level, or with `up` false the least.

    At most about `most` levels, which divide the weight evenly.
    """
    sizes, place = np.unique(column, return_inverse=True)
    if len(sizes) <= most:
        return column
    share = float(weights.sum()) / most
    number, filled = np.zeros(len(sizes), np.int64), 0.0
    for n, weight in enumerate(np.bincount(place, weights).tolist()[:-1]):
        filled += weight
        number[n + 1] = number[n]
        if filled >= share:
            number[n + 1], filled = number[n] + 1, 0.0
    first = np.flatnonzero(np.diff(number, prepend=-1))
    edges = np.append(first[1:] - 1, len(sizes) - 1) if up else first
    found: Integers = sizes[edges[number[place]]]
    return found


def grouped(sizes: Integers, exact: Sequence[int]) -> list[Integers]:
    """The rows that agree in the dims `exact`, group by group."""
    if not exact:
        return [sizes]
    group = distinct(sizes[:, exact])[1]
    order = np.argsort(group, kind="stable")
    return np.split(sizes[order], np.flatnonzero(np.diff(group[order])) + 1)
