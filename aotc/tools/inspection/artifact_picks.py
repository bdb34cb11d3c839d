"""What autotuning decided in an artifact: read, compared, and written down for `aotc build --picks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from aotc.picks import (
    PICKS_SCHEMA_VERSION,
    Candidate,
    Pick,
    PickFile,
    PickKind,
    UnitPicks,
)
from aotc.records import Record, part_name
from aotc.store.layout.built import read_built, read_picks
from aotc.store.layout.bundle import read_bundle
from aotc.store.opening import open_readable
from aotc.store.reference import parse_reference


def picks_of(ref: str, store_path: Path | str) -> list[UnitPicks]:
    """The picks of every variant of a bundle, launch modes included; variants without picks give none. Of a parallel
    model, those of each kind of code that its ranks run.

    Raises ReferenceFormatError, NotFoundError, CorruptError, SchemaVersionError, StoreError.
    """
    reference = parse_reference(ref)
    store = open_readable(reference.store or str(store_path))
    artifacts = [read_built(store, entry) for entry in read_bundle(store, reference).artifacts]
    kinds = [kind for artifact in artifacts for kind in (artifact, *artifact.kinds)]
    # A variant that several kinds have is read once.
    variants = {variant.picks.blob: variant for kind in kinds for variant in kind.variants if variant.picks}
    found = (read_picks(store, variant) for variant in variants.values())
    return [unit for unit in found if unit is not None]


def exported(units: Sequence[UnitPicks]) -> bytes:
    """The pick file of these units: each pick with its winner alone, in a stable order, one pick a line."""
    pinned = (msgspec.structs.replace(unit, picks=tuple(map(_pinned, unit.picks))) for unit in units)
    in_order = sorted(
        pinned, key=lambda unit: (unit.model, unit.target, part_name(unit.region, unit.bucket), unit.ranks)
    )
    file = msgspec.to_builtins(PickFile(PICKS_SCHEMA_VERSION, tuple(in_order)))
    return msgspec.json.format(msgspec.json.encode(file, order="sorted"), indent=2) + b"\n"


def _pinned(pick: Pick) -> Pick:
    # Of a launch both figures are kept: they are in the record of an artifact that is built so.
    if pick.kind == "launch":
        return pick
    # Without the spread: it decides nothing, and aotc 0.1 reads the file too.
    winner = msgspec.structs.replace(pick.winner, median_ms=None, calls=0)
    return msgspec.structs.replace(pick, candidates=(winner,), chosen=0)


class PickChange(Record, frozen=True):
    """A question that two builds answered differently, or that one of them did not ask.

    `cost`: the time of the second's winner over that of the first's, less one: in one race that timed both, else each
    as measured in its own build.
    """

    unit: str
    kind: PickKind
    subject: str
    first: Candidate | None
    second: Candidate | None
    cost: float | None = None
    inputs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


def changes(first: Sequence[UnitPicks], second: Sequence[UnitPicks]) -> list[PickChange]:
    """Where two builds picked otherwise, unit by unit."""
    return [change for unit, before, after in _paired(first, second) for change in unit_changes(unit, before, after)]


def _paired(
    first: Sequence[UnitPicks], second: Sequence[UnitPicks]
) -> Iterator[tuple[str, UnitPicks | None, UnitPicks | None]]:
    names = [{unit.name: unit for unit in units} for units in (first, second)]
    for name in dict.fromkeys([*names[0], *names[1]]):
        yield name, names[0].get(name), names[1].get(name)


def unit_changes(unit: str, before: UnitPicks | None, after: UnitPicks | None) -> Iterator[PickChange]:
    """Where two builds of one unit picked otherwise; `unit` is its name."""
    old, new = ({pick.identity: pick for pick in side.picks} if side else {} for side in (before, after))
    for identity in sorted(old.keys() | new.keys()):
        one, two = old.get(identity), new.get(identity)
        if one and two and one.winner.same_code(two.winner):
            continue
        either = one or two
        assert either is not None
        winners = (one.winner if one else None, two.winner if two else None)
        yield PickChange(unit, either.kind, either.subject, *winners, _cost(one, two), either.inputs, either.arguments)


def _cost(one: Pick | None, two: Pick | None) -> float | None:
    if one is None or two is None:
        return None
    races = [(_ms(pick, one.winner), _ms(pick, two.winner)) for pick in (one, two)]
    races.append((one.winner.ms, two.winner.ms))
    return next((after / before - 1 for before, after in races if before and after), None)


def _ms(pick: Pick, candidate: Candidate) -> float | None:
    return next((other.ms for other in pick.candidates if other.same_code(candidate)), None)
