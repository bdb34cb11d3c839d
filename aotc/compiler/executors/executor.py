"""The interface of executors, which compile the units of a build."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from aotc.compiler.task import Compiled, Task
from aotc.compiler.workers.stage_costs import OnProgress


class Executor(Protocol):
    """Compiles units, each in processes of its own.

    `slots` threads call `compile` at a time; about `parallel` units run, the others wait. `end` ends every process at
    once, and raises KeyboardInterrupt in each thread that is in `compile` or enters it.
    """

    @property
    def slots(self) -> int: ...

    @property
    def parallel(self) -> int: ...

    def compile(self, task: Task, on_progress: OnProgress) -> AbstractContextManager[Compiled]:
        """The compiled unit, whose files exist while the context is active. Raises AotcError."""

    def raise_if_ended(self) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None:
        """Release all resources. Units that still run are killed."""
