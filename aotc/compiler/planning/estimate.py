"""The expected seconds and memory of the units of a build, from earlier builds of these or similar units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from aotc.compiler.messages import Unit
from aotc.compiler.planning.cache_lookup import PlannedUnit
from aotc.records import bucket_name
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitCost, unit_costs


@dataclass(frozen=True)
class Estimate:
    """Seconds, bytes of memory and bytes in the store by unit name, for the units to compile that have an estimate.

    `weights`: the bytes in the store of their frozen weights, which the buckets of a model share.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    disk: Mapping[str, int] = field(default_factory=dict)
    weights: int = 0


def estimate(store: Store | None, planned: Sequence[PlannedUnit]) -> Estimate:
    """Costs of a unit's last build; for a new unit, those of the other units of its model, region and target: the mean
    of the seconds, the maximum of the memory.

    Raises StoreError where the store cannot be read.
    """
    units = [plan.unit for plan in planned if plan.cached is None]
    earlier = unit_costs(store) if store is not None and units else []
    likely = {unit.name: found for unit in units if (found := _likely(unit, earlier))}
    mapped: dict[tuple[str, str], int] = {}
    for costs in likely.values():
        for cost in costs:
            part = cost.model, cost.target
            mapped[part] = max(mapped.get(part, 0), cost.mapped)
    return Estimate(
        {name: mean(cost.seconds for cost in costs) for name, costs in likely.items()},
        {name: max(cost.memory for cost in costs) for name, costs in likely.items()},
        {name: round(mean(cost.size for cost in costs)) for name, costs in likely.items()},
        sum(mapped.values()),
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
    """Seconds until a build is done, at `slots` units at a time. `running` gives the seconds since each unit began.

    A unit without an `expected` time counts as the mean of those that this build has `finished`, else of all expected.
    None where nothing is known.
    """
    usual = mean(finished) if finished else mean(expected.values()) if expected else None
    known = {name: seconds for name in (*waiting, *running) if (seconds := expected.get(name, usual)) is not None}
    if not known:
        return None
    left = [max(0.0, seconds - running.get(name, 0.0)) for name, seconds in known.items()]
    return max(max(left), sum(left) / slots)
