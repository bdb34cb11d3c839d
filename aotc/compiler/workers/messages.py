"""All that the processes of a build say to each other. Nothing here imports torch.

build → fork server          ForkRequest: JSON on its socket
build → a unit's processes   Job: a file
a unit's processes → build   Doing, Span; last UnitCompiled, UnitRan or UnitFailed: JSON lines on standard output
build ↔ task of a cluster    NodeRequest, NodeProgress, NodeAnswer: pickled
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from aotc.errors import AotcError, Issue
from aotc.manifest.types import ModelSpec
from aotc.picks import Pick, UnitPicks
from aotc.provenance import BuiltArtifact
from aotc.records import Bucket, Dims, Record, Region, Smoked
from aotc.store import Shared, UnitRecord

if TYPE_CHECKING:
    from aotc.compiler.plan import Unit
    from aotc.compiler.workers.stage_costs import StageCosts

# -- build → fork server ----------------------------------------------------------------------------------------------


class ForkRequest(Record, frozen=True):
    """Run `module`, as `python -m` does, in a fork with these arguments and this environment."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]


# -- build → a unit's processes ---------------------------------------------------------------------------------------


class Job(Record, frozen=True):
    """One unit, for both of its processes: compile it, then run the result once.

    `pins` are the picks made for this unit, `seeds` those of other units of its target; `locked`: measure nothing.
    `shared` is the folder in which the units of a build keep their answers for each other; without, there are none.
    `precompile`: there are so many units that headers are precompiled for them, in that folder.
    `region` names the one of `regions` that is compiled, with what it is given when the model runs at `sizes`.
    `sources` are those that the key was computed from.
    """

    spec: ModelSpec
    folder: str
    bucket: Bucket
    target: str
    key: str
    output: str
    pins: UnitPicks | None = None
    seeds: tuple[Pick, ...] = ()
    locked: bool = False
    shared: str = ""
    precompile: bool = False
    region: str = ""
    regions: tuple[Region, ...] = ()
    sizes: Dims = msgspec.field(default_factory=dict)
    sources: dict[str, str] = msgspec.field(default_factory=dict)


# -- a unit's processes → build ---------------------------------------------------------------------------------------

STAGE = "stage"
INDUCTOR = "inductor"


class Doing(Record, frozen=True, tag="doing"):
    """A stage that has begun, or with `detail` what is done within it."""

    stage: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.stage}: {self.detail}" if self.detail else self.stage


class Span(Record, frozen=True, tag="span"):
    """Something that has ended: `began` in seconds since the epoch, by the clock of `host`.

    `kind` is `stage`; `lowering`, `autotuning`, `compiling` or `linking` within one; or `inductor` for a phase of
    Inductor's own. `memory` is the most bytes that the unit's processes had of their own at once.
    """

    name: str
    kind: str
    began: float
    seconds: float
    host: str = ""
    process: int = 0
    thread: int = 0
    memory: int = 0


Progress = Doing | Span


class Autotuned(Record, frozen=True):
    """What autotuning did in a unit: how many candidates failed and were dropped, how many decisions were pinned, which
    were measured, with how many measurements, and what other units had made already; which pins are stale;
    `unavailable` says why picks are not recorded; `notes` which performance patches of torch are not applied, and what
    the model did while it was traced and will not do again."""

    failed_candidates: int = 0
    pinned: int = 0
    tuned: tuple[str, ...] = ()
    measurements: int = 0
    shared: Shared = Shared()
    stale: tuple[str, ...] = ()
    unavailable: str = ""
    notes: tuple[str, ...] = ()


class UnitCompiled(Record, frozen=True, tag="compiled"):
    """The unit's files and its record lie in the job's output folder."""

    autotuned: Autotuned


class UnitRan(Record, frozen=True, tag="ran"):
    """The result was run once, and does what the model does."""

    smoked: Smoked


class UnitFailed(Record, frozen=True, tag="failed"):
    """Why it cannot be compiled, or what is wrong with the result; `source` is a line of the model's code."""

    message: str
    hint: str
    stage: str
    source: str = ""
    issues: tuple[Issue, ...] = ()


Reply = UnitCompiled | UnitRan | UnitFailed
"""The last message of a process. One that died gave none."""


class Message(Record, frozen=True):
    """One line of a process's standard output."""

    said: Progress | Reply


# -- build ↔ task of a cluster ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeRequest:
    """A unit whose manifest lies in `folder`, below the task's working folder; its result goes to the store at the URL
    `store`, or else comes back. `variables` are the environment of its processes, those that are None unset."""

    unit: Unit
    folder: str
    locked: bool
    store: str | None
    variables: Mapping[str, str | None]


class NodeProgress(NamedTuple):
    """What the unit of this `key` does."""

    key: str
    progress: Progress


@dataclass(frozen=True)
class NodeAnswer:
    """What became of a unit. `ended` is the node's clock, as in `costs`, in seconds since the epoch."""

    log: bytes
    error: AotcError | None = None
    autotuned: Autotuned | None = None
    artifact: BuiltArtifact | None = None
    files: Mapping[str, bytes] | None = None
    stored: UnitRecord | None = None
    costs: StageCosts | None = None
    ended: float = 0.0
    smoked: Smoked | None = None
