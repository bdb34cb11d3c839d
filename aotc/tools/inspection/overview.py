"""Data for the HTML page about an artifact, gathered from its record, its blobs and its units."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from aotc.provenance import BuiltArtifact, BuiltVariant, CallTimes, Kernel, Report
from aotc.records import part_name
from aotc.store.layout.built import read_built, read_picks, read_report
from aotc.store.layout.bundle import Bundle, each_file
from aotc.store.layout.units import UnitRecord, find_built
from aotc.store.readable import ReadableStore
from aotc.tools.inspection.races import RaceGroup, make_race
from aotc.verify.verdicts import VerifyReport

NEW_SESSION = timedelta(minutes=2)
"""A pause of the build after which the timeline starts anew, so that days between two units are not drawn."""
LONGEST_DIFF = 0.5
"""A kernel's further sources are shown as what differs from the first, unless that is longer than this share of it."""

_TRITON_CALL = re.compile(r"\s*async_compile\.triton\([^\n]*'''\n(?P<source>.*)\n''',[^\n]*\)\s*", re.DOTALL)


class KernelSource(msgspec.Struct, frozen=True):
    """One source of a kernel, and the buckets that use it; `is_diff`: only what differs from the kernel's first."""

    buckets: tuple[str, ...]
    text: str
    is_diff: bool = False


class KernelOverview(msgspec.Struct, frozen=True):
    """A kernel of one name and one list of operators, in all buckets that have it. `calls` per run: fewest and most."""

    id: str
    name: str
    kind: str
    operators: tuple[str, ...]
    calls: tuple[int, int]
    buckets: tuple[str, ...]
    sources: tuple[KernelSource, ...]


class Fate(msgspec.Struct, frozen=True):
    """Where one operator of the model went: the kernels that do it, each with what it is fused with there."""

    operator: str
    kernels: tuple[KernelOverview, ...]


class LaunchGroup(msgspec.Struct, frozen=True):
    """Buckets that launch alike: per call, so many generated kernels and library calls, for so many operators."""

    buckets: tuple[str, ...]
    operators: int
    generated: int
    library: int

    @property
    def total(self) -> int:
        return self.generated + self.library


class BucketOverview(msgspec.Struct, frozen=True):
    """One bucket: its record, its launches (None without a report), sizes in bytes, and its unit, if it is here."""

    name: str
    variant: BuiltVariant
    launches: int | None
    size: int
    compressed: int
    unit: UnitRecord | None

    @property
    def times(self) -> CallTimes | None:
        return self.unit.times if self.unit else None

    @property
    def on_busy_machine(self) -> bool:
        """Whether other processes disturbed the calls that were timed."""
        return self.times is not None and self.times.on_busy_machine


class BuildStage(msgspec.Struct, frozen=True):
    name: str
    start: float
    seconds: float


class UnitTime(msgspec.Struct, frozen=True):
    """When one unit was built, in seconds since the session began, and for how long."""

    bucket: str
    start: float
    seconds: float
    stages: tuple[BuildStage, ...]


class BuildSession(msgspec.Struct, frozen=True):
    """Units that were built without a long pause between them: `began` is RFC 3339."""

    began: str
    seconds: float
    units: tuple[UnitTime, ...]


class Overview(msgspec.Struct, frozen=True):
    """One artifact, as the page shows it; `verdicts` are those that were given of it."""

    artifact: BuiltArtifact
    digest: str
    launches: tuple[LaunchGroup, ...]
    kernels: tuple[KernelOverview, ...]
    fates: tuple[Fate, ...]
    races: tuple[RaceGroup, ...]
    buckets: tuple[BucketOverview, ...]
    sessions: tuple[BuildSession, ...]
    size: int
    compressed: int
    verdicts: tuple[VerifyReport, ...] = ()


def overviews(store: ReadableStore, bundle: Bundle, verdicts: Sequence[VerifyReport] = ()) -> list[Overview]:
    """One for each artifact. Raises NotFoundError, CorruptError, SchemaVersionError, StoreError."""
    return [
        _overview(
            store,
            read_built(store, entry),
            entry.digest,
            tuple(verdict for verdict in verdicts if verdict.target == entry.target),
        )
        for entry in bundle.artifacts
    ]


def _overview(
    store: ReadableStore, artifact: BuiltArtifact, digest: str, verdicts: tuple[VerifyReport, ...]
) -> Overview:
    names = [part_name(variant.region, variant.bucket) for variant in artifact.variants]
    found = zip(names, (read_report(store, variant) for variant in artifact.variants), strict=True)
    reports = {name: report for name, report in found if report is not None}
    kernels = _kernels(reports)
    buckets = tuple(_bucket(store, variant, reports) for variant in artifact.variants)
    files = {file.digest: file for file in each_file(artifact)}.values()
    return Overview(
        artifact=artifact,
        digest=digest,
        launches=_launches(reports),
        kernels=kernels,
        fates=_fates(kernels),
        races=_races(store, artifact, buckets),
        buckets=buckets,
        sessions=_sessions([(bucket.name, bucket.unit) for bucket in buckets if bucket.unit]),
        size=sum(file.size for file in files),
        compressed=sum(file.blob_size for file in files),
        verdicts=verdicts,
    )


def _bucket(store: ReadableStore, variant: BuiltVariant, reports: dict[str, Report]) -> BucketOverview:
    name = part_name(variant.region, variant.bucket)
    report = reports.get(name)
    return BucketOverview(
        name=name,
        variant=variant,
        launches=sum(kernel.calls for kernel in report.kernels) if report else None,
        size=sum(file.size for file in variant.files),
        compressed=sum(file.blob_size for file in variant.files),
        unit=find_built(store, variant.key),
    )


# -- kernels ----------------------------------------------------------------------------------------------------------


def _launches(reports: dict[str, Report]) -> tuple[LaunchGroup, ...]:
    """The buckets with equal counts together, those with most buckets first."""
    alike: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    for bucket, report in reports.items():
        library = sum(kernel.calls for kernel in report.kernels if kernel.kind == "extern")
        generated = sum(kernel.calls for kernel in report.kernels) - library
        alike[report.captured_operators, generated, library].append(bucket)
    ordered = sorted(alike.items(), key=lambda item: -len(item[1]))
    return tuple(LaunchGroup(tuple(buckets), *counts) for counts, buckets in ordered)


def _kernels(reports: dict[str, Report]) -> tuple[KernelOverview, ...]:
    """Each kernel once: generated ones first, and those that are launched most often, by their most calls."""
    uses: dict[tuple[str, str, tuple[str, ...]], list[tuple[str, Kernel]]] = defaultdict(list)
    for bucket, report in reports.items():
        for kernel in report.kernels:
            uses[kernel.name, kernel.kind, kernel.operators].append((bucket, kernel))
    ordered = sorted(uses.values(), key=lambda used: (used[0][1].kind == "extern", -len(used[0][1].operators)))
    return tuple(_kernel(f"k{index}", used) for index, used in enumerate(ordered))


def _kernel(identity: str, used: Sequence[tuple[str, Kernel]]) -> KernelOverview:
    kernel = used[0][1]
    calls = [other.calls for _, other in used]
    by_source: dict[str, list[str]] = defaultdict(list)
    for bucket, other in used:
        if other.source:
            by_source[_readable(other.source)].append(bucket)
    return KernelOverview(
        id=identity,
        name=kernel.name,
        kind=kernel.kind,
        operators=kernel.operators,
        calls=(min(calls), max(calls)),
        buckets=tuple(bucket for bucket, _ in used),
        sources=tuple(_sources(by_source)),
    )


def _readable(source: str) -> str:
    """A Triton kernel's source comes as the text within a call that compiles it."""
    call = _TRITON_CALL.fullmatch(source)
    return call["source"] if call else source.strip("\n")


def _sources(by_source: dict[str, list[str]]) -> Iterable[KernelSource]:
    """The source that most buckets use in full; the others as what differs from it, where that is shorter."""
    ordered = sorted(by_source.items(), key=lambda item: -len(item[1]))
    for index, (text, buckets) in enumerate(ordered):
        first = ordered[0][0]
        if index:
            lines = difflib.unified_diff(first.splitlines(), text.splitlines(), lineterm="", n=1)
            shorter = "\n".join(list(lines)[2:])
            if len(shorter) < LONGEST_DIFF * len(text):
                yield KernelSource(tuple(buckets), shorter, is_diff=True)
                continue
        yield KernelSource(tuple(buckets), text)


def _fates(kernels: Sequence[KernelOverview]) -> tuple[Fate, ...]:
    by_operator: dict[str, list[KernelOverview]] = defaultdict(list)
    for kernel in kernels:
        for operator in kernel.operators:
            by_operator[operator].append(kernel)
    return tuple(Fate(operator, tuple(doing)) for operator, doing in sorted(by_operator.items()))


def _races(store: ReadableStore, artifact: BuiltArtifact, buckets: Sequence[BucketOverview]) -> tuple[RaceGroup, ...]:
    """Of each bucket, those first whose winners take most of a call."""
    groups = []
    for variant, bucket in zip(artifact.variants, buckets, strict=True):
        unit = read_picks(store, variant)
        if unit is not None and unit.picks:
            call_ms = bucket.times.compiled.least_ms if bucket.times else None
            races = sorted((make_race(pick, call_ms) for pick in unit.picks), key=lambda race: -(race.share or 0.0))
            groups.append(RaceGroup(bucket.name, unit.device, unit.triton, tuple(races)))
    return tuple(groups)


# -- times ------------------------------------------------------------------------------------------------------------


def _sessions(units: Sequence[tuple[str, UnitRecord]]) -> tuple[BuildSession, ...]:
    timed = sorted(
        ((_ended(unit) - timedelta(seconds=unit.seconds), bucket, unit) for bucket, unit in units),
        key=lambda item: item[:2],
    )
    sessions: list[list[tuple[datetime, str, UnitRecord]]] = []
    latest = datetime.min.replace(tzinfo=UTC)
    for began, bucket, unit in timed:
        if not sessions or began - latest > NEW_SESSION:
            sessions.append([])
        sessions[-1].append((began, bucket, unit))
        latest = max(latest, _ended(unit))
    return tuple(map(_session, sessions))


def _ended(unit: UnitRecord) -> datetime:
    """When the unit was finished; the epoch if its record holds no valid time."""
    try:
        ended = datetime.fromisoformat(unit.created)
    except ValueError:
        ended = datetime(1970, 1, 1)
    return ended if ended.tzinfo else ended.replace(tzinfo=UTC)


def _session(units: Sequence[tuple[datetime, str, UnitRecord]]) -> BuildSession:
    began = units[0][0]
    return BuildSession(
        began=began.isoformat(timespec="seconds").replace("+00:00", "Z"),
        seconds=max((_ended(unit) - began).total_seconds() for _, _, unit in units),
        units=tuple(
            UnitTime(bucket, (start - began).total_seconds(), unit.seconds, _stages(unit))
            for start, bucket, unit in units
        ),
    )


def _stages(unit: UnitRecord) -> tuple[BuildStage, ...]:
    """Each stage in the order of their starts; none where the build did not record them."""
    ordered = sorted(unit.stages.items(), key=lambda item: item[1].began)
    return tuple(BuildStage(name, cost.began, cost.seconds) for name, cost in ordered)
