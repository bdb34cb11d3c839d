"""What the parts of a build and its processes say to each other. All of the compiler imports this module, which imports
none of it, nor torch.

plan → executors → store     Unit, Task, FinishedUnit
build → fork server          ForkRequest: JSON on its socket
build → a unit's processes   Job: a file
a unit's processes → build   Doing, Span; last UnitCompiled, UnitRan, WrongPart or UnitFailed: JSON lines on standard
                             output
build ↔ task of a cluster    NodeRequest, NodeProgress, NodeAnswer: pickled
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aotc.digest import sha256_json
from aotc.errors import AotcError, Issue
from aotc.machine.gpus import Gpu
from aotc.machine.targets import Target
from aotc.manifest.types import ModelSpec
from aotc.picks import Pick, UnitPicks
from aotc.provenance import BuiltArtifact, Smoked
from aotc.records import Bucket, Dims, Record, Region, Variant, part_name
from aotc.store.layout.units import Shared, StageCost, UnitRecord

# -- plan → executors → store -----------------------------------------------------------------------------------------

Factors = dict[str, Any]
"""The named inputs of a unit, whose digest is its key (`aotc.compiler.planning.key`)."""


class Pins(NamedTuple):
    """The pins of a unit: its own picks; or, if the file has none for it, those of its target's other units, which
    answer equal questions, measured on `seeds_device`. `further` are the unit's own for other ranks' code."""

    own: UnitPicks | None = None
    seeds: tuple[Pick, ...] = ()
    seeds_device: str = ""
    further: tuple[UnitPicks, ...] = ()

    def of_rank(self, rank: int) -> UnitPicks | None:
        """Its own picks for the code of this rank; None where the file has none."""
        own = [self.own] if self.own else []
        return next((unit for unit in (*own, *self.further) if not unit.ranks or rank in unit.ranks), None)

    @property
    def device(self) -> str:
        """The name of the GPU or CPU on which the pins were measured; "" without pins."""
        return self.own.device if self.own else self.seeds_device

    def digest(self) -> str:
        """The factor for the pins in the unit's key."""
        return sha256_json((self.own, self.seeds, *self.further)) if self.own or self.seeds else "none"


NO_PINS = Pins()


LONGEST_NAME = 150
"""Bytes of a unit's name in the name of its log; file systems limit names to 255 bytes, or fewer."""


class Unit(Record, frozen=True):
    """Model × region × bucket × target: the smallest thing that is compiled, cached and scheduled.

    `region` names the compiled one of the model's `regions`, "" where the model is compiled whole. Its example inputs
    are those that the model passes to it at `sizes`; `calls` are those that the model itself is padded to (see
    `aotc.records.Artifact`). `state_bytes` is the size of the model's parameters and buffers.

    `gpu` is the GPU that the unit is compiled for where this machine lacks it, and `absent` are the target's CPU
    features that it lacks: nothing is measured, and the result is not run. With `untuned`, a decision without a pin is
    then Inductor's default.
    """

    spec: ModelSpec
    bucket: Bucket
    target: Target
    factors: Factors
    key: str
    pins: Pins = NO_PINS
    state_bytes: int = 0
    region: str = ""
    regions: tuple[Region, ...] = ()
    calls: tuple[Variant, ...] = ()
    sizes: Dims = msgspec.field(default_factory=dict)
    gpu: Gpu | None = None
    absent: tuple[str, ...] = ()
    untuned: bool = False

    @property
    def runs_here(self) -> bool:
        return self.gpu is None and not self.absent

    @property
    def part(self) -> str:
        """The unit's region and bucket, as one name."""
        return part_name(self.region, self.bucket)

    @property
    def name(self) -> str:
        return f"{self.spec.name} {self.part} {self.target.name}"

    @property
    def log_name(self) -> str:
        """The file name of its log: its name; if that is too long, the beginning of it and a part of the key."""
        name = re.sub(r"[^A-Za-z0-9._=-]+", "_", self.name)
        return f"{name}.log" if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{self.key[7:23]}.log"


class Settings(Record, frozen=True):
    """How a build compiles its units.

    `locked`: a unit that needs a decision without a pick fails. `untuned`: a unit for a GPU that this machine lacks
    takes Inductor's default there. `force`: also compile units that the store holds. `share`: units share measurements
    and compiled files. `dummy_weights`: the modules' parameters need no memory and have values of
    `aotc.models.dummy_weights`, on which the checks run. `partial`: the bundle of a model of which a unit failed is
    published, too, without that unit. `jobs`: units at a time on this machine, by default as many as fit its cores and
    memory.
    """

    locked: bool = False
    untuned: bool = False
    force: bool = False
    share: bool = True
    dummy_weights: bool = False
    partial: bool = False
    jobs: int | None = None


DEFAULTS = Settings()


@dataclass(frozen=True)
class Task:
    """One unit of a manifest in `folder`; its processes write to the file `log`. `graphs` and `store` are as in
    `Job`."""

    unit: Unit
    folder: Path
    log: Path
    settings: Settings
    graphs: Mapping[str, str] = field(default_factory=dict)
    store: str = ""


@dataclass(frozen=True)
class FinishedUnit:
    """A unit that was compiled and run once: its files are in `folder`, or it is already in the store, as `stored`.

    `costs` were recorded by another machine; None if the caller recorded them from the progress reports.
    """

    autotuned: Autotuned
    artifact: BuiltArtifact | None = None
    folder: Path | None = None
    smoked: Smoked | None = None
    stored: UnitRecord | None = None
    costs: StageCosts | None = None


# -- build → fork server ----------------------------------------------------------------------------------------------


class ForkRequest(Record, frozen=True):
    """Run `module`, as `python -m` does, in a fork with these arguments and this environment."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]


# -- build → a unit's processes ---------------------------------------------------------------------------------------


class Job(Record, frozen=True):
    """One unit of a manifest in `folder`, for its processes: the first compiles it, the second runs the result once.
    Where that is `miscompiled`, a third looks for the part of the model that is; with extreme values at the sizes
    `extremes`, if there are some; in forks, if it `crashed`. Of `settings` they read `locked` and `dummy_weights`.

    `shared` is the folder in which the units of a build share picks and compiled files; "" for none. `precompile`:
    precompile headers in that folder. `ranks` of a parallel model: those without code yet, of which the first one's is
    compiled; () for all. `graphs` has the keys of those units of `store` that may have the same code, by those of their
    graphs.
    """

    unit: Unit
    folder: str
    output: str
    settings: Settings = DEFAULTS
    shared: str = ""
    precompile: bool = False
    ranks: tuple[int, ...] = ()
    miscompiled: bool = False
    extremes: Dims | None = None
    crashed: bool = False
    graphs: dict[str, str] = msgspec.field(default_factory=dict)
    store: str = ""

    @property
    def rank(self) -> int:
        return self.ranks[0] if self.ranks else 0

    @property
    def pins(self) -> UnitPicks | None:
        """The picks that are pinned for the code of its rank."""
        return self.unit.pins.of_rank(self.rank)


# -- a unit's processes → build ---------------------------------------------------------------------------------------

STAGE = "stage"
INDUCTOR = "inductor"
WAITING = "waiting"


class Doing(Record, frozen=True, tag="doing"):
    """A stage that has begun, or, with `detail`, a step within it."""

    stage: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.stage}: {self.detail}" if self.detail else self.stage


class Span(Record, frozen=True, tag="span"):
    """A step that has ended: `began` in seconds since the epoch, by the clock of `host`.

    `kind` is `stage`; `lowering`, `autotuning`, `compiling`, `linking` or `waiting` within one; or `inductor` for a
    phase that Inductor itself reports. `process` is 0 of what the build's own process did for the unit. `memory` is
    the peak of the private bytes of the unit's processes. `core`: the seconds for which they were ready to run and
    waited for a core, summed over their main threads.
    """

    name: str
    kind: str
    began: float
    seconds: float
    host: str = ""
    process: int = 0
    thread: int = 0
    memory: int = 0
    core: float = 0.0


Progress = Doing | Span


def span_here(name: str, kind: str, began: float, ended: float) -> Span:
    """A span of this thread of this process."""
    thread = threading.get_native_id()
    return Span(name, kind, began, max(0.0, ended - began), socket.gethostname(), os.getpid(), thread)


def wait_here(what: str, began: float, ended: float) -> Span:
    """A wait of this thread, see `aotc.machine.locks`."""
    return span_here(f"wait {what}", WAITING, began, ended)


class Autotuned(Record, frozen=True):
    """The autotuning of a unit: the number of candidates that failed and were dropped, of pinned decisions, and of
    measurements; `tuned`: the decisions that were measured; `shared`: results taken from other units; `stale`: stale
    pins; `notes`: patches of torch that are not applied, and side effects of the model that happen only
    while it is traced. `reused` is the key of the unit whose code was taken, "" where it was compiled."""

    failed_candidates: int = 0
    pinned: int = 0
    tuned: tuple[str, ...] = ()
    measurements: int = 0
    shared: Shared = Shared()
    stale: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reused: str = ""


class UnitCompiled(Record, frozen=True, tag="compiled"):
    """The unit is compiled: its files and its record are in the job's output folder."""

    autotuned: Autotuned


class UnitRan(Record, frozen=True, tag="ran"):
    """The result was run once, and agrees with the model."""

    smoked: Smoked


class UnitFailed(Record, frozen=True, tag="failed"):
    """The unit cannot be compiled, or its result is wrong; `source` is a line of the model's code. `miscompiled`: the
    compiled code runs, and computes another thing than the model; `extremes`: with extreme values, at these sizes."""

    message: str
    hint: str
    stage: str
    source: str = ""
    issues: tuple[Issue, ...] = ()
    miscompiled: bool = False
    extremes: Dims | None = None


class WrongPart(Record, frozen=True, tag="part"):
    """The part of a unit that torch's compiler makes wrong code of: its operators, the model's line, what mends it."""

    operators: str
    source: str
    hint: str


Reply = UnitCompiled | UnitRan | UnitFailed | WrongPart
"""The last message of a process. A process that died has sent none."""


class Message(Record, frozen=True):
    """One line of a process's standard output."""

    payload: Progress | Reply


OnProgress = Callable[[Progress], None]


class StageCosts:
    """Adds up the spans of one unit, which began at `began` (seconds since the epoch)."""

    def __init__(self, began: float) -> None:
        self.began = began
        self._parts: dict[str, float] = {}
        self.stages: dict[str, StageCost] = {}

    def add(self, progress: Progress) -> None:
        if isinstance(progress, Doing) or progress.kind == INDUCTOR:
            return
        if progress.kind != STAGE:
            self._parts[progress.kind] = self._parts.get(progress.kind, 0.0) + progress.seconds
            return
        parts = {kind: round(seconds, 3) for kind, seconds in sorted(self._parts.items())}
        self._parts.clear()
        began = round(max(0.0, progress.began - self.began), 3)
        self.stages[progress.name] = StageCost(began, round(progress.seconds, 3), progress.memory, parts)


# -- build ↔ task of a cluster ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeRequest:
    """A unit, with its manifest's `folder` below the task's working folder. The result goes to the store at the URL
    `store`, or is sent back if that is None. `variables` are set for its processes, or unset where they are None."""

    unit: Unit
    folder: str
    settings: Settings
    store: str | None
    variables: Mapping[str, str | None]


class NodeProgress(NamedTuple):
    """The progress of the unit with this `key`."""

    key: str
    progress: Progress


@dataclass(frozen=True)
class NodeAnswer:
    """The outcome of a unit: its error, or what was compiled, with the `files` that the store does not hold. `ended` is
    in seconds since the epoch, by the node's clock, as are the costs."""

    log: bytes
    error: AotcError | None = None
    compiled: FinishedUnit | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    ended: float = 0.0
