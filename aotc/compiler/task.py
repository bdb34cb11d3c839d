"""The input and the result of an executor: a `Task` and a `Compiled`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aotc.compiler.plan import Unit
from aotc.compiler.workers.messages import Autotuned
from aotc.compiler.workers.stage_costs import StageCosts
from aotc.provenance import BuiltArtifact, Smoked
from aotc.store.layout.units import UnitRecord


@dataclass(frozen=True)
class Task:
    """One unit of a manifest in `folder`; its processes write to the file `log`. `locked`: fail, do not measure.
    `dummy_weights`: parameters have values of `aotc.models.dummy_weights`. `graphs` and `store` are as in `Job`."""

    unit: Unit
    folder: Path
    log: Path
    locked: bool = False
    dummy_weights: bool = False
    graphs: Mapping[str, str] = field(default_factory=dict)
    store: str = ""


@dataclass(frozen=True)
class Compiled:
    """A unit that was compiled and run once: its files are in `folder`, or it is already in the store, as `stored`.

    `costs` were recorded by another machine; None if the caller recorded them from the progress reports.
    """

    autotuned: Autotuned
    artifact: BuiltArtifact | None = None
    folder: Path | None = None
    smoked: Smoked | None = None
    stored: UnitRecord | None = None
    costs: StageCosts | None = None
