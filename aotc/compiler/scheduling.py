"""In which order the units of a build begin, and that several run at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from aotc.compiler.cache_lookup import PlannedUnit
from aotc.compiler.executors import Executor
from aotc.compiler.plan import Unit
from aotc.records import tuned_dims

T = TypeVar("T")
R = TypeVar("R")


def each_unit(function: Callable[[PlannedUnit], R], planned: Sequence[PlannedUnit], executor: Executor) -> list[R]:
    """What `function` gives for each unit, side by side, begun in the order in which they can share most."""
    order = sharing_order([plan.unit for plan in planned])
    ended = side_by_side(function, [planned[index] for index in order], executor)
    return [result for _, result in sorted(zip(order, ended, strict=True), key=lambda pair: pair[0])]


def sharing_order(units: Sequence[Unit]) -> list[int]:
    """The units' positions in the order in which they should begin: those last whose questions others have answered.

    Buckets of equally many elements (1 × 256 and 2 × 128 tokens) have most matrix products in common. Side by side they
    would wait for each other's answers; so one of each kind begins, first of the kinds that are most frequent.
    """
    alike: dict[Any, list[int]] = {}
    for index, unit in enumerate(units):
        elements = math.prod(tuned_dims(unit.bucket).values())
        alike.setdefault((unit.spec.name, unit.region, unit.target.name, elements), []).append(index)
    kinds = sorted(alike.values(), key=len, reverse=True)
    return [index for begin in (True, False) for kind in kinds for index in (kind[:1] if begin else kind[1:])]


def side_by_side(function: Callable[[T], R], units: Sequence[T], executor: Executor) -> list[R]:
    """What `function` gives for each unit, as many at a time as the executor takes; an error or Ctrl-C ends it."""
    with ThreadPoolExecutor(max_workers=executor.slots) as pool:
        futures = [pool.submit(function, plan) for plan in units]
        try:
            wait_for(futures)
        except BaseException:
            executor.end()
            for future in futures:
                future.cancel()
            raise
    return [future.result() for future in futures]


def wait_for(futures: Iterable[Future[R]]) -> None:
    """Wait in slices: a plain wait would not see Ctrl-C before a unit ends."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=0.5)
        for future in done:
            future.result()
