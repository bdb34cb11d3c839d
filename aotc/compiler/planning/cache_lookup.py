"""Look up a unit in the store: its finished record, or the reasons why it must be compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aotc.compiler.messages import Unit
from aotc.compiler.planning.key import explain
from aotc.errors import Issue
from aotc.store.layout.units import StoredUnits, UnitRecord, find_unit


@dataclass(frozen=True)
class PlannedUnit:
    """A unit with its finished record (`cached`), or with the reasons why it must be compiled.

    `replaced` is the finished record of a unit that is compiled again with `--force`. `graphs` are the keys of stored
    units whose code may be this one's, by those of their graphs: only the capture tells.
    """

    unit: Unit
    cached: UnitRecord | None
    reasons: tuple[Issue, ...]
    replaced: UnitRecord | None = None
    graphs: Mapping[str, str] = field(default_factory=dict)


def look_up(
    stored: StoredUnits | None,
    unit: Unit,
    force: bool,
    changed: Mapping[str, Sequence[Issue]],
    line_of: Callable[..., str] = lambda *keys: "",
) -> PlannedUnit:
    """The unit with its record in the store, or with the reasons why it must be compiled; `line_of` as in `explain`.

    A unit is found by its key, and is used if what its capture read has the same values now: `changed`, as in
    `ModelFacts`. `stored` is None where there is no store yet. Raises StoreError.
    """
    if stored is None:
        return PlannedUnit(unit, None, (Issue("there is no store yet"),))
    found = find_unit(stored.store, unit.key)
    if force:
        return PlannedUnit(unit, None, (Issue("--force"),), replaced=found)
    if found is not None:
        (variant,) = found.artifact.variants
        issues = changed.get(variant.read_values.digest, ()) if variant.read_values is not None else ()
        if not issues:
            return PlannedUnit(unit, found, ())
        return PlannedUnit(unit, None, tuple(issues), replaced=found, graphs=_graphs(stored, unit))
    previous = stored.latest(unit.spec.name, unit.bucket, unit.target.name, unit.region)
    if previous is None:
        return PlannedUnit(unit, None, (Issue(_not_built(stored, unit)),))
    reasons = explain(previous.factors, unit.factors, line_of)
    return PlannedUnit(unit, None, tuple(reasons) or (Issue("its blobs are gone"),), graphs=_graphs(stored, unit))


def _graphs(stored: StoredUnits, unit: Unit) -> dict[str, str]:
    return stored.graphs(unit.spec.name, unit.bucket, unit.target.name, unit.region)


def _not_built(stored: StoredUnits, unit: Unit) -> str:
    """Why the store has no record of the unit with any key."""
    log = f".aotc/logs/{unit.log_name}"
    if (stored.store.path / log).exists():
        return f"failed in the last build: see {log}"
    others = stored.targets(unit.spec.name, unit.bucket, unit.region)
    return f"built for {', '.join(others)} only" if others else "not built before"
