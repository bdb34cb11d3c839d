"""Which bucket takes which sizes, by the loader's rule (`aotc.call_table.rules`), from a manifest alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aotc.expressions import tightness
from aotc.records import Bucket, SizeRange, takes
from aotc.tools.advise.arrays import owners
from aotc.tools.advise.trace import DimSizes


class Dispatch:
    """The buckets of one model. `elements` gives the input elements of a call, which the loader measures padding in."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dims: Sequence[str],
        padded: frozenset[str],
        elements: Callable[[DimSizes], float],
    ) -> None:
        self._elements = elements
        self._padded_axes = [axis for axis, dim in enumerate(dims) if dim in padded]
        rows = [tuple(bucket[dim] for dim in dims) for bucket in buckets]
        self._rows = rows
        self._fixed: dict[DimSizes, int] = {}
        for index, row in enumerate(rows):
            if not any(isinstance(size, SizeRange) for size in row):
                self._fixed.setdefault(tuple(int(str(size)) for size in row), index)
        self._by_cost = sorted((elements(sizes), sizes, index) for sizes, index in self._fixed.items())
        self._ranges = [index for index, row in enumerate(rows) if any(isinstance(size, SizeRange) for size in row)]

    def choose(self, shapes: Sequence[DimSizes]) -> list[tuple[int, DimSizes] | None]:
        """For each call the index of the bucket, and the sizes at which it runs; None for a miss."""
        found: list[tuple[int, DimSizes] | None] = []
        for shape in shapes:
            found.append(None if (index := self._fixed.get(shape)) is None else (index, shape))
        left = [n for n, chosen in enumerate(found) if chosen is None]
        if self._padded_axes and self._by_cost and left:
            boxes = [sizes for _, sizes, _ in self._by_cost]
            owner = owners(boxes, np.array([shapes[n] for n in left]), self._padded_axes)
            for n, box in zip(left, owner.tolist(), strict=True):
                if box >= 0:
                    found[n] = self._by_cost[box][2], boxes[box]
        return [chosen or self._in_a_range(shape) for chosen, shape in zip(found, shapes, strict=True)]

    def _in_a_range(self, shape: DimSizes) -> tuple[int, DimSizes] | None:
        fitting = {index: run for index in self._ranges if (run := self._run_sizes(index, shape)) is not None}
        held = [index for index, run in fitting.items() if run == shape]
        if held:
            return min(held, key=lambda index: self._rank(index, shape)), shape
        if not fitting:
            return None
        index = min(fitting, key=lambda one: (self._elements(fitting[one]), self._rank(one, fitting[one])))
        return index, fitting[index]

    def is_range(self, index: int) -> bool:
        return any(isinstance(size, SizeRange) for size in self._rows[index])

    def _run_sizes(self, index: int, shape: DimSizes) -> DimSizes | None:
        run = list(shape)
        for axis in self._padded_axes:
            entry = self._rows[index][axis]
            grown = entry.at_least(shape[axis]) if isinstance(entry, SizeRange) else max(entry, shape[axis])
            run[axis] = shape[axis] if grown is None else grown
        return tuple(run) if all(map(takes, self._rows[index], run)) else None

    def _rank(self, index: int, shape: DimSizes) -> tuple[int, int, int]:
        return *tightness(self._rows[index], shape), index
