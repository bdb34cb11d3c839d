"""The interface of executors, which compile the units of a build, and running several units at a time on one, in the
order in which they share most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from aotc.compiler.messages import FinishedUnit, OnProgress, Task, Unit
from aotc.compiler.planning.cache_lookup import PlannedUnit
from aotc.records import tuned_dims

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

    def compile(self, task: Task, on_progress: OnProgress) -> AbstractContextManager[FinishedUnit]:
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


def each_unit(function: Callable[[PlannedUnit], R], planned: Sequence[PlannedUnit], executor: Executor) -> list[R]:
    """`function` of each unit, in the order of `planned`; run in parallel, begun in `sharing_order`."""
    order = sharing_order([plan.unit for plan in planned])
    ended = side_by_side(function, [planned[index] for index in order], executor)
    return [result for _, result in sorted(zip(order, ended, strict=True), key=lambda pair: pair[0])]


def sharing_order(units: Sequence[Unit]) -> list[int]:
    """The units' positions in the order in which to begin: first one of each kind, then those that can take its picks.

    Buckets of equally many elements (1 × 256 and 2 × 128 tokens) have most matrix products in common. In parallel they
    would wait for each other's measurements. The most frequent kinds begin first.
    """
    alike: dict[Any, list[int]] = {}
    for index, unit in enumerate(units):
        elements = math.prod(tuned_dims(unit.bucket).values())
        alike.setdefault((unit.spec.name, unit.region, unit.target.name, elements), []).append(index)
    kinds = sorted(alike.values(), key=len, reverse=True)
    return [index for begin in (True, False) for kind in kinds for index in (kind[:1] if begin else kind[1:])]
