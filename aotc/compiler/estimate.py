"""What the units of a build will cost, from what they or their like cost before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from aotc.compiler.cache_lookup import PlannedUnit
from aotc.compiler.plan import Unit
from aotc.records import bucket_name
from aotc.store import Store, UnitCost, unit_costs


@dataclass(frozen=True)
class Estimate:
    """By unit name, of the units that are to be compiled and of which something is known: seconds, bytes of memory."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)


def estimate(store: Store | None, planned: Sequence[PlannedUnit]) -> Estimate:
    """A unit costs what it cost last time; one that is new, what others of its model, region and target did.

    Raises StoreError where the store cannot be read.
    """
    units = [plan.unit for plan in planned if plan.cached is None]
    earlier = unit_costs(store) if store is not None and units else []
    likely = {unit.name: found for unit in units if (found := _likely(unit, earlier))}
    return Estimate(
        {name: mean(cost.seconds for cost in costs) for name, costs in likely.items()},
        {name: max(cost.memory for cost in costs) for name, costs in likely.items()},
    )


def _likely(unit: Unit, earlier: Iterable[UnitCost]) -> list[UnitCost]:
    part = unit.spec.name, unit.region, unit.target.name
    like = [cost for cost in earlier if (cost.model, cost.region, cost.target) == part]
    same = [cost for cost in like if bucket_name(cost.bucket) == bucket_name(unit.bucket)]
    return same[-1:] or like


def remaining(
    expected: Mapping[str, float],
    waiting: Iterable[str],
    running: Mapping[str, float],
    finished: Sequence[float],
    slots: int,
) -> float | None:
    """Seconds until a build is done: of `waiting` units, of `running` ones since so many seconds, `slots` at a time.

    A unit of which nothing is known takes as long as those that this build has `finished`; None where there are none.
    """
    usual = mean(finished) if finished else mean(expected.values()) if expected else None
    known = {name: seconds for name in (*waiting, *running) if (seconds := expected.get(name, usual)) is not None}
    if not known:
        return None
    left = [max(0.0, seconds - running.get(name, 0.0)) for name, seconds in known.items()]
    return max(max(left), sum(left) / slots)
