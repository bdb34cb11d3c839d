"""The order in which the units of a build begin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from aotc.compiler.cache_lookup import PlannedUnit
from aotc.compiler.executors.executor import Executor, side_by_side
from aotc.compiler.messages import Unit
from aotc.records import tuned_dims

T = TypeVar("T")
R = TypeVar("R")


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
