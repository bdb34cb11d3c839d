"""Reports of a build: events while it runs, outcomes at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from aotc.compiler.messages import Autotuned, Doing, Progress, Span, Unit
from aotc.compiler.planning.cache_lookup import PlannedUnit
from aotc.compiler.planning.estimate import Estimate
from aotc.errors import AotcError
from aotc.manifest import ModelSpec
from aotc.provenance import CallTimes
from aotc.store.layout.bundle import each_file
from aotc.store.layout.units import Shared, UnitRecord

UnitStatus = Literal["built", "reused", "cached", "failed"]

LITTLE_CODE = 16 << 10
"""Bytes of machine code that the GPU's driver may compile in a service without a note: each cuDNN operator is 4 KB."""
SLOWER = 0.95
"""A lower speed-up over eager is noted; one that a busy machine or few calls leave open is not."""


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one unit. `bucket` includes the region's name, if there is one; `size`: compressed bytes of its
    blobs; `log`: path of a failed unit's log; `shared`: what the unit took from other units of this build."""

    model: str
    bucket: str
    target: str
    status: UnitStatus
    seconds: float
    size: int = 0
    error: AotcError | None = None
    log: str = ""
    notes: tuple[str, ...] = ()
    shared: Shared = Shared()


class Event(msgspec.Struct, frozen=True):
    """An event of a unit: a step began (`doing`), a step ended (`span`), or the unit ended (`outcome`)."""

    unit: Unit
    doing: Doing | None = None
    span: Span | None = None
    outcome: Outcome | None = None


class BuildReport(msgspec.Struct, frozen=True):
    """All outcomes in the manifest's order, the digest of each published bundle by model, the number of units of all
    shards.

    `unpublished` says of other models why they were not published though a unit was built; it is empty for a shard.
    `before` is the digest that each model's tag named before; models whose tag is new are not in it.
    """

    outcomes: tuple[Outcome, ...]
    bundles: dict[str, str]
    units: int
    unpublished: dict[str, str] = {}
    before: dict[str, str] = {}

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]

    @property
    def shared(self) -> Shared:
        """The sums over all units of what they took from other units of this build."""
        names = Shared.__struct_fields__
        return Shared(*(sum(getattr(outcome.shared, name) for outcome in self.outcomes) for name in names))


OnEvent = Callable[[Event], None]


class Watcher(Protocol):
    """Receives the progress of a build from begin to end."""

    def planning(self) -> AbstractContextManager[None]:
        """A context in which code of the models runs in this process."""

    def planned(self, planned: Sequence[PlannedUnit]) -> None:
        """Called with all units, before any is compiled."""

    def compiling(
        self, planned: Sequence[PlannedUnit], parallel: int, known: Estimate
    ) -> AbstractContextManager[OnEvent]:
        """A context in which the units are compiled, about `parallel` at a time. Their threads call the returned
        function with each event."""


class NoWatcher:
    """A `Watcher` that ignores everything."""

    def planning(self) -> AbstractContextManager[None]:
        return nullcontext()

    def planned(self, planned: Sequence[PlannedUnit]) -> None:
        pass

    def compiling(
        self, planned: Sequence[PlannedUnit], parallel: int, known: Estimate
    ) -> AbstractContextManager[OnEvent]:
        return nullcontext(lambda event: None)


# -- the outcome of a unit --------------------------------------------------------------------------------------------


def finished(unit: Unit, record: UnitRecord, autotuned: Autotuned | None, seconds: float, log: Path) -> Outcome:
    """The outcome of a unit that is in the store; `autotuned` is None if this build did not compile it."""
    return Outcome(
        unit.spec.name,
        unit.part,
        unit.target.name,
        "cached" if autotuned is None else "reused" if autotuned.reused else "built",
        # The record's seconds, without the wait for a node of a cluster.
        record.seconds if autotuned else seconds,
        size=sum({file.blob: file.blob_size for file in each_file(record.artifact)}.values()),
        notes=(*_notes(record, log), *_autotuning_notes(unit, autotuned)),
        shared=autotuned.shared if autotuned else Shared(),
    )


def failed(unit: Unit, error: AotcError, seconds: float, log: Path) -> Outcome:
    return Outcome(unit.spec.name, unit.part, unit.target.name, "failed", seconds, error=error, log=str(log))


def not_planned(spec: ModelSpec, error: AotcError) -> Outcome:
    """The outcome of a model that has no units, because planning it failed."""
    return Outcome(spec.name, "-", ",".join(spec.targets), "failed", 0.0, error=error)


def as_event(unit: Unit, progress: Progress) -> Event:
    return Event(unit, doing=progress) if isinstance(progress, Doing) else Event(unit, span=progress)


def _notes(record: UnitRecord, log: Path) -> tuple[str, ...]:
    """Notes on a finished unit: code that is slower than eager, its launch mode, a region's cost, code that the driver
    compiles, dropped candidates."""
    launch = record.artifact.variants[0].launch
    notes = _slower_than_eager(record.times) if launch is None or not launch.graph else []
    if launch is not None:
        how = "as a CUDA graph" if launch.graph else "directly"
        timed = launch.direct_ms is not None and launch.graph_ms is not None
        figures = f"direct {launch.direct_ms:.4f} ms, graph {launch.graph_ms:.4f} ms" if timed else launch.reason
        notes.append(f"launched {how}: {figures}")
    if (cost := record.cost) is not None:
        share = cost.passing_ms / cost.regions_ms if cost.regions_ms else 0.0
        notes.append(
            f"a call of the model takes {cost.regions_ms:.3f} ms with this code, {cost.eager_ms:.3f} ms without; "
            f"passing into it {cost.calls} times slows the call by {cost.passing_ms:.3f} ms ({share:.1%})"
        )
    if record.driver_compiled > LITTLE_CODE:
        notes.append(
            f"the GPU's driver compiles {record.driver_compiled >> 10} KB for libraries' operators, like cuDNN's, at a "
            "process's load or first call: keep its cache, the folder CUDA_CACHE_PATH, from process to process"
        )
    if record.failed_candidates:
        notes.append(f"{record.failed_candidates} autotuning candidates failed and were dropped: {log}")
    return tuple(notes)


def _slower_than_eager(times: CallTimes | None) -> list[str]:
    if times is None or times.eager is None or (speedup := times.speedup) is None or speedup >= SLOWER:
        return []
    return [
        f"SLOWER THAN EAGER: a call takes {times.compiled.least_ms:.3f} ms, and {times.eager.least_ms:.3f} in eager; "
        "compare with `weights: frozen` or another `mode`, or leave it to eager: `aotc bench` shows both"
    ]


def _autotuning_notes(unit: Unit, autotuned: Autotuned | None) -> list[str]:
    """Notes on autotuning, for a unit that was compiled now: with pins, which picks were pinned, measured or stale."""
    if autotuned is None:
        return []
    notes = [*autotuned.notes]
    if autotuned.reused:
        return [*notes, f"nothing was compiled: its graph is that of the unit {autotuned.reused[7:19]}, as is its code"]
    if unit.pins.own or unit.pins.seeds:
        whose = "pinned" if unit.pins.own else "taken from other units' pins"
        others = f", {autotuned.shared.picks} measured in other units of this build" if autotuned.shared.picks else ""
        notes.append(f"{autotuned.pinned} picks {whose}, {len(autotuned.tuned)} measured{others}")
        notes += [f"measured, since it is not pinned: {what}" for what in autotuned.tuned]
        notes += [f"stale: {what}" for what in autotuned.stale]
    return notes
