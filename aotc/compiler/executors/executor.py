"""The interface of executors, which compile the units of a build, and running several units at a time on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from aotc.compiler.messages import Compiled, OnProgress, Task

T = TypeVar("T")
R = TypeVar("R")


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


def side_by_side(function: Callable[[T], R], units: Sequence[T], executor: Executor) -> list[R]:
    """`function` of each unit, `executor.slots` at a time. An error or Ctrl-C ends the executor and is raised."""
    with ThreadPoolExecutor(max_workers=executor.slots) as pool:
        try:  # from the first submission on: Ctrl-C may come while its unit runs already
            futures = [pool.submit(function, plan) for plan in units]
            wait_for(futures)
        except BaseException:
            executor.end()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def wait_for(futures: Iterable[Future[R]]) -> None:
    """Wait in slices: a plain wait would notice Ctrl-C only when a unit ends."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=0.5)
        for future in done:
            future.result()
