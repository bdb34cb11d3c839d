"""Everything that was measured of one model: the document of `aotc bench --json`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import msgspec

from aotc.amounts import seconds_text
from aotc.provenance import WAITED
from aotc.tools.bench.contender_messages import Counted, Launches, Started, Used
from aotc.tools.bench.contenders import CONTENDERS
from aotc.tools.bench.latency_comparison import Latency, LatencyRatio, compare

LARGE = 0.25
"""Share of a start above which a part of it is worth a word."""


class ContenderMeasurements(msgspec.Struct):
    """A contender: its starts in order; what its steady process used, None without one; what failed."""

    name: str
    label: str
    starts: list[Started] = msgspec.field(default_factory=list)
    used: Used | None = None
    failure: str = ""

    @property
    def first_output(self) -> float:
        """Seconds, the median of the starts."""
        return statistics.median(start.first_output for start in self.starts)

    def step(self, name: str) -> float:
        """Seconds of a step, the median of the starts; 0 where the contender has no such step."""
        return statistics.median(start.seconds.get(name, 0.0) for start in self.starts)

    @property
    def compilers(self) -> list[str]:
        """The compilers imported, until the end."""
        found = {name for start in self.starts for name in start.compilers}
        return sorted(found | {*(self.used.compilers if self.used else ())})

    @property
    def peak_rss(self) -> int:
        """Bytes until the first output."""
        return max(start.peak_rss for start in self.starts)

    @property
    def peak_gpu(self) -> int | None:
        return max((start.peak_gpu for start in self.starts if start.peak_gpu is not None), default=None)


class BucketReport(msgspec.Struct):
    """One bucket at some sizes, by contender: latency; launches of a call; calls a second by the number of threads.

    first_calls: milliseconds of the bucket's first call in the steady process (of the first bucket, its second).
    noise_floor: see `aotc.tools.bench.latency_comparison`. failures: what a contender could not do.
    """

    bucket: str
    dims: dict[str, int]
    latencies: dict[str, Latency] = msgspec.field(default_factory=dict)
    first_calls: dict[str, float] = msgspec.field(default_factory=dict)
    comparisons: list[LatencyRatio] = msgspec.field(default_factory=list)
    noise_floor: float = 1.0
    launches: dict[str, Launches] = msgspec.field(default_factory=dict)
    throughput: dict[str, dict[int, Counted]] = msgspec.field(default_factory=dict)
    failures: list[str] = msgspec.field(default_factory=list)


class Replayed(msgspec.Struct, frozen=True):
    """A fresh process that was called along a trace. ms: of each call in order, compilation included.

    graphs: compiled by torch.compile after its first output. misses: calls that no bucket of aotc took, run in eager.
    """

    start: Started
    ms: tuple[float, ...]
    latency: Latency
    graphs: int
    misses: int

    @property
    def seconds(self) -> float:
        """Seconds from the start of the process to the last output."""
        return self.start.first_output + sum(self.ms) / 1e3


class TraceReport(msgspec.Struct):
    """The same calls, in the same order, for each contender."""

    source: str
    calls: int
    distinct: int
    replayed: dict[str, Replayed] = msgspec.field(default_factory=dict)
    failures: list[str] = msgspec.field(default_factory=list)


class BenchReport(msgspec.Struct):
    """machine, versions: by name. waited: seconds that threads waited for a CPU, per second of the timed calls.

    stopped: why there are no further measurements, "" if all were made.
    """

    model: str
    ref: str
    digest: str
    target: str
    machine: dict[str, str]
    versions: dict[str, str]
    contenders: dict[str, ContenderMeasurements]
    buckets: list[BucketReport]
    trace: TraceReport | None = None
    waited: float = 0.0
    notes: list[str] = msgspec.field(default_factory=list)
    stopped: str = ""

    @property
    def busy(self) -> bool:
        """Whether other work on the machine disturbed the calls."""
        return self.waited > WAITED

    @property
    def started(self) -> list[ContenderMeasurements]:
        return [one for one in self.contenders.values() if one.starts]

    @property
    def subject(self) -> str:
        """The contender that the others are compared with: aotc, else the first one that does not compile, else the
        first one; "" before any has started."""
        started = [CONTENDERS[one.name] for one in self.started]
        first = sorted(started, key=lambda one: (one.name != "aotc", not one.steady, one.slow))
        return first[0].name if first else ""

    def start_comparisons(self) -> Iterator[LatencyRatio]:
        """Time to the first output: each contender against the subject."""
        subject = self.subject
        for one in self.started:
            if one.name != subject:
                own = [start.first_output for start in self.contenders[subject].starts]
                yield compare(one.name, own, [start.first_output for start in one.starts])

    def faster_starts(self) -> Iterator[str]:
        """What shortens the start of aotc with its module, at its largest parts; with figures, where there are some."""
        if "aotc" not in {one.name for one in self.started}:
            return
        ours = self.contenders["aotc"]
        module, whole = ours.step("model"), ours.first_output
        process = sum(ours.step(step) for step in ("import torch", "imports", "device"))
        if module > LARGE * whole:
            yield (
                f"of aotc's {seconds_text(whole)}, {seconds_text(module)} construct the module and import its library: "
                f"aotc.load(REF, weights=FILE) does neither{self._measured('aotc-file')}"
            )
        if process > LARGE * whole:
            yield (
                f"of aotc's {seconds_text(whole)}, {seconds_text(process)} are of the process: aotc.prepare once, and "
                f"fork{self._measured('aotc-forked')}; aotc.early overlaps them (aotc/runtime/FAST_START.md)"
            )

    def _measured(self, name: str) -> str:
        one = self.contenders.get(name)
        return f" ({name}: {seconds_text(one.first_output)})" if one and one.starts else ""

    def reattach(self, name: str) -> float | None:
        """Seconds from the module to the first output, less those of eager's first call. None of a start without a
        module, and without eager."""
        eager = self.contenders.get("eager")
        if eager is None or not eager.starts or name == "eager" or not CONTENDERS[name].needs_module:
            return None
        own = statistics.median(start.attached for start in self.contenders[name].starts)
        return own - statistics.median(start.attached for start in eager.starts)
