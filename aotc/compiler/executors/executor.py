"""Who compiles the units of a build."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from aotc.compiler.task import Compiled, Task
from aotc.compiler.workers.stage_costs import OnProgress


class Executor(Protocol):
    """Compiles units, each in processes of its own.

    `compile` is called by `slots` threads at a time; about `parallel` units then run, and others wait their turn. When
    `end` is called, every process ends at once, and each thread in `compile`, or entering it, gets a KeyboardInterrupt.
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
