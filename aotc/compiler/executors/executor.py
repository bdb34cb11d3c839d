"""What a build asks of an executor, and what it gets."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aotc.compiler.job import Autotuned
from aotc.compiler.plan import Unit
from aotc.compiler.workers.progress import OnProgress, StageCosts
from aotc.records import Artifact, Smoked
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
    """A unit that was compiled: its files lie in `folder`, or it is in the store already, as `stored`.

    `costs` are what another machine noted; else they are what was told while it was compiled.
    """

    autotuned: Autotuned
    artifact: Artifact | None = None
    folder: Path | None = None
    stored: UnitRecord | None = None
    costs: StageCosts | None = None
    smoked: Smoked | None = None


class Executor(Protocol):
    """Compiles units, each in processes of its own.

    `compile` is called by `slots` threads at a time; about `parallel` units then run, and others wait their turn. When
    `end` is called, every process ends at once, and whoever is in `compile`, or comes to it, gets a KeyboardInterrupt.
    """

    @property
    def slots(self) -> int: ...

    @property
    def parallel(self) -> int: ...

    def compile(self, task: Task, on_progress: OnProgress) -> AbstractContextManager[Compiled]:
        """The compiled unit, whose files are there as long as the context lasts. Raises AotcError."""

    def raise_if_ended(self) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None:
        """Let go of everything. Nothing is running any more, or it need not end well."""
