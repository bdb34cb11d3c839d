"""Look up a unit in the store: its finished record, or the reasons why it must be compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotc.compiler.key import explain
from aotc.compiler.plan import Unit
from aotc.compiler.workers.unit_log import log_name
from aotc.errors import Issue
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, find_unit, latest_unit, targets_built


@dataclass(frozen=True)
class PlannedUnit:
    """A unit with its finished record (`cached`), or with the reasons why it must be compiled.

    `replaced` is the finished record of a unit that is compiled again with `--force`.
    """

    unit: Unit
    cached: UnitRecord | None
    reasons: tuple[Issue, ...]
    replaced: UnitRecord | None = None


def look_up(
    store: Store | None, unit: Unit, force: bool, line_of: Callable[..., str] = lambda *keys: ""
) -> PlannedUnit:
    """The unit with its record in the store, or with the reasons why it must be compiled; `line_of` as in `explain`."""
    if store is None:
        return PlannedUnit(unit, None, (Issue("there is no store yet"),))
    found = find_unit(store, unit.key)
    if force:
        return PlannedUnit(unit, None, (Issue("--force"),), replaced=found)
    if found is not None:
        return PlannedUnit(unit, found, ())
    previous = latest_unit(store, unit.spec.name, unit.bucket, unit.target.name, unit.region)
    if previous is None:
        return PlannedUnit(unit, None, (Issue(_not_built(store, unit)),))
    reasons = explain(previous.factors, unit.factors, line_of)
    return PlannedUnit(unit, None, tuple(reasons) or (Issue("its blobs are gone"),))


def _not_built(store: Store, unit: Unit) -> str:
    """Why the store has no record of the unit with any key."""
    log = f".aotc/logs/{log_name(unit)}"
    if (store.path / log).exists():
        return f"failed in the last build: see {log}"
    others = targets_built(store, unit.spec.name, unit.bucket, unit.region)
    return f"built for {', '.join(others)} only" if others else "not built before"
