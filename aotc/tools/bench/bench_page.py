"""The page of `aotc bench --html`. Names come from a manifest, messages from a model's code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from aotc.amounts import seconds_text
from aotc.tools.advise.advice_page import Tick
from aotc.tools.bench.contenders import CONTENDERS
from aotc.tools.bench.latency_comparison import Latency, LatencyRatio, in_words
from aotc.tools.bench.measurements import BenchReport, BucketReport, ContenderMeasurements, Replayed, TraceReport

STEPS = {
    "import torch": ("python", "import torch"),
    "other imports": ("imports",),
    "GPU context": ("device",),
    "model": ("model",),
    "load": ("load",),
    "first call": ("first call",),
}
"""The parts of a start's bar."""
LONGEST = 6.0
"""Latencies beyond this many times the fastest median end at the edge of their chart."""
WIDTH, HEIGHT = 1000, 280


class TimelineStep(NamedTuple):
    name: str
    style: str


class TimelinePart(NamedTuple):
    style: str
    x: float
    width: float
    text: str


class StartRow(NamedTuple):
    name: str
    label: str
    total: float
    parts: list[TimelinePart]
    processes: int
    least: float
    most: float
    reattach: float | None
    rss: int
    gpu: int | None
    compilers: str


class Row(NamedTuple):
    """A contender's calls; places are shares of the chart's width."""

    name: str
    style: str
    latency: Latency
    p50: float
    last: float | None
    ticks: list[float]
    dots: list[float]
    first: float | None
    rates: list[float | None]
    host: str
    kernels: str


class RateBar(NamedTuple):
    name: str
    style: str
    threads: int
    rate: float
    width: float


class Line(NamedTuple):
    text: str
    badge: str
    won: bool


class BucketSection(NamedTuple):
    report: BucketReport
    title: str
    rounds: int
    rows: list[Row]
    verdicts: list[Line]
    columns: list[str]
    bars: list[RateBar]


class Curve(NamedTuple):
    name: str
    style: str
    points: str
    replayed: Replayed


class LatencyCurves(NamedTuple):
    lines: list[Curve]
    y_ticks: list[Tick]
    logarithmic: bool


class ModelSection(NamedTuple):
    report: BenchReport
    gpu: bool
    steps: list[TimelineStep]
    starts: list[StartRow]
    start_verdicts: list[str]
    failures: list[str]
    buckets: list[BucketSection]
    trace: LatencyCurves | None


def render_page(reports: Sequence[BenchReport]) -> str:
    """The whole page, as HTML, with a part for each model."""
    from aotc.tools.html_page import render

    filters = {"bytes": _bytes, "rate": _rate}
    return render("aotc.tools.bench", filters, models=[_model(report) for report in reports])


def _model(report: BenchReport) -> ModelSection:
    gpu = "GPU" in report.machine
    longest = max((one.first_output for one in report.started), default=1.0)
    return ModelSection(
        report,
        gpu,
        [TimelineStep(name, f"s{number}") for number, name in enumerate(STEPS) if gpu or name != "GPU context"],
        [_start(report, one, longest) for one in report.started],
        [*(in_words(one, report.subject) for one in report.start_comparisons()), *report.faster_starts()],
        [f"{one.label}: {one.failure}" for one in report.contenders.values() if one.failure],
        [_bucket(report, bucket) for bucket in report.buckets if bucket.latencies],
        _trace(report.trace) if report.trace and report.trace.replayed else None,
    )


def _style(name: str) -> str:
    """The colour of a contender whose calls are timed, the same in every chart."""
    steady = [contender.name for contender in CONTENDERS.values() if contender.steady]
    return f"c{steady.index(name)}" if name in steady else "c4"


def _start(report: BenchReport, one: ContenderMeasurements, longest: float) -> StartRow:
    parts, x = [], 0.0
    for number, (name, steps) in enumerate(STEPS.items()):
        seconds = sum(map(one.step, steps))
        parts.append(TimelinePart(f"s{number}", x, seconds / longest, f"{name}: {seconds_text(seconds)}"))
        x += seconds / longest
    firsts = [start.first_output for start in one.starts]
    compilers = ", ".join(one.compilers)
    return StartRow(
        one.name,
        one.label,
        one.first_output,
        parts,
        len(firsts),
        min(firsts),
        max(firsts),
        report.reattach(one.name),
        one.peak_rss,
        one.peak_gpu,
        compilers,
    )


def _bucket(report: BenchReport, bucket: BucketReport) -> BucketSection:
    fastest = min(latency.p50 for latency in bucket.latencies.values())
    slowest = max(latency.p99 or latency.p95 or max(latency.rounds) for latency in bucket.latencies.values())
    edge = min(slowest, LONGEST * max(fastest, max(one.p50 for one in bucket.latencies.values()) / 3)) * 1.02
    threads = sorted({number for each in bucket.throughput.values() for number in each})
    rates = {
        name: [each[number].calls / each[number].seconds if number in each else None for number in threads]
        for name, each in bucket.throughput.items()
    }
    highest = max((rate for each in rates.values() for rate in each if rate), default=1.0)
    bars = [
        RateBar(name, _style(name), number, rate, rate / highest)
        for place, number in enumerate(threads)
        for name, each in rates.items()
        if (rate := each[place]) is not None
    ]
    rows = [_row(bucket, name, edge, rates.get(name, [None] * len(threads))) for name in bucket.latencies]
    at = ",".join(f"{dim}={size}" for dim, size in sorted(bucket.dims.items()))
    title = bucket.bucket if at in ("", bucket.bucket) else f"{bucket.bucket} at {at}"
    rounds = max(len(latency.rounds) for latency in bucket.latencies.values())
    verdicts = [_line(comparison, report.subject) for comparison in bucket.comparisons]
    columns = [f"#{number} at a time" for number in threads]
    return BucketSection(bucket, title, rounds, rows, verdicts, columns, bars)


def _row(bucket: BucketReport, name: str, edge: float, rates: list[float | None]) -> Row:
    latency, launches = bucket.latencies[name], bucket.launches.get(name)
    ends = [ms / edge for ms in (latency.p95, latency.p99) if ms is not None]
    return Row(
        name,
        _style(name),
        latency,
        latency.p50 / edge,
        ends[-1] if ends else None,
        ends,
        [ms / edge for ms in latency.rounds],
        bucket.first_calls.get(name),
        rates,
        "–" if launches is None or launches.host is None else f"{launches.host:,}",
        "–" if launches is None or launches.kernels is None else f"{launches.kernels:,}",
    )


def _line(comparison: LatencyRatio, subject: str) -> Line:
    return Line(in_words(comparison, subject), comparison.verdict, comparison.verdict == "faster")


def _trace(trace: TraceReport) -> LatencyCurves:
    """When each call was answered, in seconds from the start of its process."""
    times = {
        name: [one.start.first_output + done / 1e3 for done in itertools.accumulate(one.ms)]
        for name, one in trace.replayed.items()
    }
    least, most = min(each[0] for each in times.values()), max(each[-1] for each in times.values())
    logarithmic = most > 12 * least
    scale = math.log if logarithmic else float
    low, high = (scale(least / 1.2), scale(most * 1.1)) if logarithmic else (0.0, most * 1.05)

    def height(seconds: float) -> float:
        return 1 - (scale(seconds) - low) / (high - low)

    lines = []
    for name, each in times.items():
        places = (number / max(1, len(each) - 1) * WIDTH for number in range(len(each)))
        points = " ".join(f"{x:.1f},{height(y) * HEIGHT:.1f}" for x, y in zip(places, each, strict=True))
        lines.append(Curve(name, _style(name), points, trace.replayed[name]))
    ticks = [Tick(height(value), f"{value:g} s") for value in _round_values(least, most, logarithmic)]
    return LatencyCurves(lines, ticks, logarithmic)


def _round_values(least: float, most: float, logarithmic: bool) -> list[float]:
    if logarithmic:
        values = [factor * 10.0**power for power in range(-3, 6) for factor in (1, 2, 5)]
        return [value for value in values if least / 1.2 <= value <= most * 1.1]
    steps = (factor * 10.0**power for power in range(-3, 6) for factor in (1, 2, 5))
    step = next(step for step in steps if step * 5 >= most)
    return [step * number for number in range(1, 6) if step * number <= most * 1.05]


def _bytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:,.0f} MiB"


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"
