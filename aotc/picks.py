"""Autotune picks: each decision of a build with its evidence, and the file that pins them.

A variant's picks are a blob of their own (`Variant.picks`), which `aotc.load` does not fetch. `aotc picks --export`
writes the same records, each with the chosen candidate alone, to a file that `aotc build --picks` reads.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from aotc.errors import CorruptError, SchemaVersionError
from aotc.provenance import WIDE
from aotc.records import Bucket, LaunchPick, Record, Scalar, decode, part_name

PICKS_SCHEMA_VERSION = 1
PICKS_LIMIT = 64 << 20  # bytes

Identity = tuple[str, str, tuple[str, ...], str, tuple[str, ...]]

PickKind = Literal["operator", "fusion", "padding", "kernel", "launch"]


class Candidate(Record, frozen=True):
    """One way to do it: a kernel template or a library call, with its configuration, and its time in milliseconds.

    `ms`, the least of `calls` calls, is None where it was not measured, or could not be compiled or run. `median_ms` is
    None (and `calls` 0) where only one figure is known: of fusions, launch modes and pins.
    """

    name: str
    config: dict[str, Scalar] = msgspec.field(default_factory=dict)
    ms: float | None = None
    median_ms: float | None = None
    calls: int = 0

    @property
    def is_wide(self) -> bool:
        """Whether half of the calls took much longer than the fastest: the machine was busy."""
        return self.ms is not None and self.median_ms is not None and self.median_ms > WIDE * self.ms

    def same_code(self, other: Candidate) -> bool:
        return (self.name, self.config) == (other.name, other.config)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.config.items())])


class Pick(Record, frozen=True):
    """One autotune decision.

    kind: "operator": which implementation of a matrix product, convolution, …; "fusion": whether a template is fused
        with its neighbour; "padding": whether a matrix product is padded; "kernel": the configuration of a Triton
        kernel; "launch": direct or as a CUDA graph.
    subject: the operator's, kernel's or fused nodes' name.
    inputs, output: `bfloat16[256, 1024] stride [1024, 1]`; empty where the subject says all.
    arguments: what the tensors do not say of an operator: `padding=[1, 1]`, `attr=relu`; or `code sha256:…`.
    candidates: the measured ones, fastest first, then those without a time.
    chosen: the index of the one that was taken.
    uses: how many times the unit asks this question; it is decided once.
    detail: what the build needs to take the pick again.
    measured_in: the unit of the same build that measured it, where that is another one.
    """

    kind: PickKind
    subject: str
    candidates: tuple[Candidate, ...]
    chosen: int = 0
    inputs: tuple[str, ...] = ()
    output: str = ""
    arguments: tuple[str, ...] = ()
    uses: int = 1
    detail: dict[str, Scalar] = msgspec.field(default_factory=dict)
    measured_in: str = ""

    @property
    def winner(self) -> Candidate:
        return self.candidates[self.chosen]

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest measured candidate that was not taken."""
        others = [c for i, c in enumerate(self.candidates) if i != self.chosen and c.ms is not None]
        return min(others, key=lambda candidate: candidate.ms or 0.0, default=None)

    @property
    def margin(self) -> float | None:
        """By how much of its own time the winner is faster than the runner-up; below 0 where another was faster."""
        other = self.runner_up
        if other is None or other.ms is None or not self.winner.ms:
            return None
        return other.ms / self.winner.ms - 1

    @property
    def within_spread(self) -> bool:
        """Whether the lead is within the winner's spread: half of its calls took as long as the runner-up, or longer.

        False where no spread was recorded.
        """
        other, median = self.runner_up, self.winner.median_ms
        return bool(other and other.ms and median and self.winner.ms and self.winner.ms <= other.ms <= median)

    @property
    def on_busy_machine(self) -> bool:
        """Whether other processes disturbed a measurement."""
        return any(candidate.is_wide for candidate in self.candidates)

    @property
    def identity(self) -> Identity:
        """What is decided: equal in two builds that ask the same question."""
        return self.kind, self.subject, self.inputs, self.output, self.arguments


class UnitPicks(Record, frozen=True):
    """All picks of one unit, and what they were measured on: `device` is the GPU's or the CPU's name. `ranks` are those
    of a parallel model that run this code; () for all."""

    model: str
    bucket: Bucket
    target: str
    torch: str
    device: str
    picks: tuple[Pick, ...]
    triton: str = ""
    region: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        of_ranks = f" rank {','.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.model} {part_name(self.region, self.bucket)} {self.target}{of_ranks}"


class PickFile(Record, frozen=True):
    """What `aotc picks --export` writes and `aotc build --picks` reads, and the blob `Variant.picks` with one unit."""

    schema: int
    units: tuple[UnitPicks, ...]


def decode_picks(data: bytes, where: str) -> PickFile:
    """Read a pick file. Raises SchemaVersionError for an unknown version, CorruptError for anything else."""
    try:
        head = decode(data, _SchemaHead)
    except CorruptError as error:
        hint = "write one with `aotc picks REF --export FILE`"
        raise CorruptError(f"{where} is not a pick file: {error.__cause__}", hint=hint, path=where) from error
    if head.schema != PICKS_SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{where} has pick schema {head.schema}; this aotc reads schema {PICKS_SCHEMA_VERSION}",
            hint="write the picks anew with `aotc picks REF --export FILE`",
            found=head.schema,
            supported=PICKS_SCHEMA_VERSION,
        )
    file = decode(data, PickFile)
    for unit in file.units:
        for pick in unit.picks:
            if not 0 <= pick.chosen < len(pick.candidates):
                raise CorruptError(
                    f"{where}: {pick.kind} {pick.subject} takes candidate {pick.chosen} of {len(pick.candidates)}",
                    hint="write the picks anew with `aotc picks REF --export FILE`",
                    path=where,
                    expected=f"0 to {len(pick.candidates) - 1}",
                    actual=str(pick.chosen),
                )
    return file


class _SchemaHead(msgspec.Struct):
    schema: int


# -- the launch mode --------------------------------------------------------------------------------------------------

MEASURED = "measured"


def launch_pick(launch: LaunchPick | None) -> Pick | None:
    """A variant's launch mode as a pick, where it was measured."""
    if launch is None or launch.direct_ms is None or launch.graph_ms is None or launch.reason != MEASURED:
        return None
    candidates = (Candidate("direct", ms=launch.direct_ms), Candidate("graph", ms=launch.graph_ms))
    return Pick(kind="launch", subject="launch mode", candidates=candidates, chosen=int(launch.graph))


GRAPH_MARGIN = 1.02
"""The factor by which a graph must be faster: it costs memory and a capture at load, so a direct launch wins a tie."""


def timed_launch(direct_ms: float, graph_ms: float, *, always: bool = False) -> LaunchPick:
    """The launch mode by the measured milliseconds of a call; with `always`, a graph in any case."""
    return LaunchPick(
        graph=always or graph_ms * GRAPH_MARGIN < direct_ms,
        direct_ms=round(direct_ms, 5),
        graph_ms=round(graph_ms, 5),
        reason="cuda_graphs: always" if always else MEASURED,
    )


def pinned_launch(picks: UnitPicks | None) -> LaunchPick | None:
    """The launch mode that a unit's pins ask for."""
    pick = next((pick for pick in picks.picks if pick.kind == "launch"), None) if picks else None
    if pick is None:
        return None
    times = {candidate.name: candidate.ms for candidate in pick.candidates}
    return LaunchPick(
        graph=pick.winner.name == "graph", direct_ms=times.get("direct"), graph_ms=times.get("graph"), reason=MEASURED
    )
