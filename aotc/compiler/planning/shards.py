"""`aotc build --shard I/N`: the part of a build that one of N machines compiles; the split is the same on all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from aotc.compiler.planning.cache_lookup import PlannedUnit
from aotc.errors import BuildError
from aotc.store.layout.plans import PLAN_SCHEMA_VERSION, PlannedKey, ShardPlan


@dataclass(frozen=True)
class Shard:
    """The part `index`, from 1, of `count`."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str) -> Shard:
    """Read a shard written as `3/8`. Raises BuildError."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(0, 0)
    if not 1 <= shard.index <= shard.count:
        raise BuildError(f"{text[:100]!r} is not a shard", hint="write 3/8 for the third of eight, from 1/8 to 8/8")
    return shard


def split(planned: Sequence[PlannedUnit], shard: Shard) -> tuple[list[PlannedUnit], ShardPlan]:
    """The units of one shard, in the manifest's order, and the plan of all shards.

    Units are dealt out in the order of their keys: the shards' sizes differ by one at most, and the large buckets of a
    model, which are neighbours in a manifest, spread over several shards.
    """
    dealt = {key: number % shard.count + 1 for number, key in enumerate(sorted({plan.unit.key for plan in planned}))}
    units = tuple(
        PlannedKey(plan.unit.name, plan.unit.spec.name, plan.unit.key, dealt[plan.unit.key]) for plan in planned
    )
    mine = [plan for plan in planned if dealt[plan.unit.key] == shard.index]
    return mine, ShardPlan(PLAN_SCHEMA_VERSION, shard.index, shard.count, units)
