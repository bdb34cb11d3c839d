"""Look up a unit in the store: its finished record, or the reasons why it must be compiled."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.compiler.key import explain
from aotc.compiler.plan import Unit
from aotc.errors import Issue
from aotc.store import Store, UnitRecord, find_unit, latest_unit


@dataclass(frozen=True)
class PlannedUnit:
    """A unit with its finished record (`cached`), or with the reasons why it must be compiled.

    `replaced` is the finished record of a unit that is compiled again with `--force`.
    """

    unit: Unit
    cached: UnitRecord | None
    reasons: tuple[Issue, ...]
    replaced: UnitRecord | None = None


def look_up(store: Store | None, unit: Unit, force: bool) -> PlannedUnit:
    """The unit with its record in the store, or with the reasons why it must be compiled."""
    if store is None:
        return PlannedUnit(unit, None, (Issue("there is no store yet"),))
    found = find_unit(store, unit.key)
    if force:
        return PlannedUnit(unit, None, (Issue("--force"),), replaced=found)
    if found is not None:
        return PlannedUnit(unit, found, ())
    previous = latest_unit(store, unit.spec.name, unit.bucket, unit.target.name, unit.region)
    if previous is None:
        return PlannedUnit(unit, None, (Issue("not built before"),))
    return PlannedUnit(unit, None, tuple(explain(previous.factors, unit.factors)) or (Issue("its blobs are gone"),))
