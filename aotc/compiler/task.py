"""What an executor is asked to do with a unit, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aotc.compiler.plan import Unit
from aotc.compiler.workers.messages import Autotuned
from aotc.compiler.workers.stage_costs import StageCosts
from aotc.provenance import BuiltArtifact
from aotc.records import Smoked
from aotc.store import UnitRecord


@dataclass(frozen=True)
class Task:
    """One unit of a manifest in `folder`; what its processes say goes to the file `log`; `locked`: measure nothing."""

    unit: Unit
    folder: Path
    log: Path
    locked: bool = False


@dataclass(frozen=True)
class Compiled:
    """A unit that was compiled, and ran once: its files lie in `folder`, or it is in the store already, as `stored`.

    `costs` are what another machine noted; else they are what was told while it was compiled.
    """

    autotuned: Autotuned
    artifact: BuiltArtifact | None = None
    folder: Path | None = None
    smoked: Smoked | None = None
    stored: UnitRecord | None = None
    costs: StageCosts | None = None
