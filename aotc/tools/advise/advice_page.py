"""The page of `aotc advise --html`. Names come from a trace and a manifest."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from aotc.records import SizeRange, has_range
from aotc.tools.advise.advice import Advice, BucketPlan, Option, manifest_block
from aotc.tools.advise.trace import Trace

COLUMNS, ROWS = 56, 32
"""Cells of the heat map."""
HEIGHT = 380  # pixels
LOGARITHMIC = 12
"""An axis whose largest size is so many times its smallest is logarithmic."""


class Tick(NamedTuple):
    at: float
    text: str


class Cell(NamedTuple):
    """Shares of the chart's width and height, from its upper left corner; `strength` is the opacity."""

    x: float
    y: float
    width: float
    height: float
    strength: float


class Box(NamedTuple):
    name: str
    x: float
    y: float
    width: float
    height: float
    ranged: bool
    today: bool


class Chart(NamedTuple):
    """The sizes along dim `x` and, where there is another, dim `y` ("": the height is the number of calls)."""

    y: str
    height: int
    label: str
    caption: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    cells: list[Cell]
    boxes: list[Box]


def render_page(trace: Trace, advice: Advice, source: str, unit: str, model: str = "") -> str:
    """The whole page, as HTML. `source` names the trace, `unit` is what costs are counted in."""
    from aotc.tools.html_page import render

    return render(
        "aotc.tools.advise",
        {"number": _number},
        advice=advice,
        source=source,
        unit=unit,
        model=model,
        chart=draw(trace, advice),
        curve=_some(advice.curve),
        most_lost=max((use.lost for use in advice.plan.buckets), default=0.0) or 1.0,
        block=manifest_block(advice),
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _some(curve: Sequence[Option]) -> list[Option]:
    """Numbers of buckets about half an octave apart, and the last."""
    shown: list[Option] = []
    for option in curve:
        if not shown or option.count >= shown[-1].count * 1.4 or option is curve[-1]:
            shown.append(option)
    return shown


# -- the chart --------------------------------------------------------------------------------------------------------


class _Axis:
    """Places of sizes on an axis, from 0 to 1, and its cells: about `bins` of one width, cut where a bucket ends, so
    that no call lies beyond the edge of the bucket that takes it."""

    def __init__(self, sizes: Sequence[int], bins: int, edges: Iterable[int]) -> None:
        low, high = min(sizes), max(sizes)
        self.logarithmic = high >= LOGARITHMIC * low
        self._scale: Callable[[float], float] = math.log if self.logarithmic else float
        edge = low / 1.3 if self.logarithmic else min(low - 0.5, low - (high - low) * 0.04)
        self._first = self._scale(max(edge, 0.5))
        self._width = (self._scale(high * 1.02 if self.logarithmic else high + (high - low) * 0.02 + 0.5)) - self._first
        self._low, self._high = low, high
        cells = (math.ceil(round(self._size_at(number / bins), 9)) - 1 for number in range(1, bins))
        self._last = sorted({high, *(size for size in (*cells, *edges) if low <= size < high)})

    def at(self, size: float) -> float:
        return min(1.0, max(0.0, (self._scale(max(size, 0.5)) - self._first) / self._width))

    def cell(self, size: int) -> int:
        return bisect_left(self._last, size)

    def extent(self, number: int) -> tuple[float, float]:
        """Where the sizes of a cell begin, and how wide they are.

        A size reaches from the one before it to its own place: a bucket's edge is the edge of the sizes that it takes.
        """
        begin = self.at(self._last[number - 1]) if number else 0.0
        return begin, self.at(self._last[number]) - begin

    def _size_at(self, place: float) -> float:
        value = self._first + place * self._width
        return math.exp(value) if self.logarithmic else value

    def ticks(self) -> list[Tick]:
        if self.logarithmic:
            powers = range(self._low.bit_length() - 1, self._high.bit_length() + 1)
            values = [1 << power for power in powers if self._low <= 1 << power <= self._high]
            values = values[:: max(1, math.ceil(len(values) / 7))]
        else:
            step = _round_step((self._high - self._low) / 5)
            values = list(range(-(-self._low // step) * step, self._high + 1, step))
        return [Tick(self.at(value), f"{value:,}") for value in values]


def _round_step(least: float) -> int:
    power = 10 ** max(0, math.floor(math.log10(least))) if least >= 1 else 1
    return next(int(power * factor) for factor in (1, 2, 5, 10) if power * factor >= least)


def draw(trace: Trace, advice: Advice) -> Chart:
    """The chart of the one or two dims with most distinct sizes."""
    dims = trace.dims
    order = sorted(range(len(dims)), key=lambda axis: -len({shape[axis] for shape in trace.counts}))
    first, second = order[0], order[1] if len(order) > 1 else None
    across = _Axis([shape[first] for shape in trace.counts], COLUMNS, _edges(advice, dims[first]))
    plans = [*([(advice.today, True)] if advice.today else []), (advice.plan, False)]
    scale = " (logarithmic)" if across.logarithmic else ""
    if second is None:
        bars, top = _bars(trace, first, across)
        boxes = [box for plan, today in plans for box in _boxes(plan, dims, first, None, across, None, today)]
        caption = f"{dims[first]}{scale}; the height is the number of calls"
        ticks = [Tick(1 - share / 1.05, f"{top * share:,.0f}") for share in ((0, 0.5, 1) if top > 3 else (0, 1))]
        return Chart("", HEIGHT, _label(trace, advice), caption, across.ticks(), ticks, bars, boxes)
    up = _Axis([shape[second] for shape in trace.counts], ROWS, _edges(advice, dims[second]))
    boxes = [box for plan, today in plans for box in _boxes(plan, dims, first, second, across, up, today)]
    caption = f"across: {dims[first]}{scale}, up: {dims[second]}{' (logarithmic)' if up.logarithmic else ''}"
    caption += "; other dims are not drawn" if len(dims) > 2 else ""
    y_ticks = [Tick(1 - tick.at, tick.text) for tick in up.ticks()]
    cells = _cells(trace, first, second, across, up)
    return Chart(dims[second], HEIGHT, _label(trace, advice), caption, across.ticks(), y_ticks, cells, boxes)


def _edges(advice: Advice, dim: str) -> Iterator[int]:
    """The sizes at which the buckets begin and end."""
    for plan in filter(None, (advice.today, advice.plan)):
        for use in plan.buckets:
            size = use.sizes[dim]
            yield from (size,) if isinstance(size, int) else (size.min - 1, size.max)


def _label(trace: Trace, advice: Advice) -> str:
    return f"{trace.calls:,} calls by {' and '.join(trace.dims)}, and {len(advice.plan.buckets)} advised buckets"


def _bars(trace: Trace, axis: int, across: _Axis) -> tuple[list[Cell], int]:
    calls: dict[int, int] = defaultdict(int)
    for shape, count in trace.counts.items():
        calls[across.cell(shape[axis])] += count
    top = max(calls.values())
    cells = []
    for n, count in sorted(calls.items()):
        x, width = across.extent(n)
        cells.append(Cell(x, 1 - count / top / 1.05, width * 0.92, count / top / 1.05, 0.55))
    return cells, top


def _cells(trace: Trace, first: int, second: int, across: _Axis, up: _Axis) -> list[Cell]:
    calls: dict[tuple[int, int], int] = defaultdict(int)
    for shape, count in trace.counts.items():
        calls[across.cell(shape[first]), up.cell(shape[second])] += count
    top = math.log1p(max(calls.values()))
    cells = []
    for (n, m), count in sorted(calls.items()):
        (x, width), (y, height) = across.extent(n), up.extent(m)
        cells.append(Cell(x, 1 - y - height, width, height, 0.08 + 0.92 * math.log1p(count) / top))
    return cells


def _boxes(
    plan: BucketPlan, dims: Sequence[str], first: int, second: int | None, across: _Axis, up: _Axis | None, today: bool
) -> list[Box]:
    found: dict[tuple[float, float, float, float], Box] = {}
    for use in plan.buckets:
        x, width = _extent(use.sizes[dims[first]], across)
        y, height = _extent(use.sizes[dims[second]], up) if second is not None and up else (0.0, 1.0)
        ranged = has_range(use.sizes)
        box = Box(use.name, x, 1 - y - height, width, height, ranged, today)
        found.setdefault(box[1:5], box)  # buckets that differ in dims that are not drawn
    return list(found.values())


def _extent(size: int | SizeRange, axis: _Axis) -> tuple[float, float]:
    if isinstance(size, int):
        return 0.0, axis.at(size)
    return axis.at(size.min), axis.at(size.max) - axis.at(size.min)
