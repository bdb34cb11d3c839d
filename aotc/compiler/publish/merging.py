"""`aotc merge`: units and bundles of several stores become one bundle for each model; on an error, nothing changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from aotc.compiler.planning.key import explain
from aotc.compiler.publish.bundles import source_date
from aotc.compiler.publish.target_artifacts import merge
from aotc.errors import BuildError, Issue
from aotc.provenance import BuiltArtifact
from aotc.reads.sources import BY_DIGEST
from aotc.records import part_name
from aotc.store.layout.blobs import Blob, missing_files
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import each_file, read_bundle
from aotc.store.layout.plans import PlannedKey, ShardPlan, read_plan
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, find_unit, put_unit
from aotc.store.reference import Reference


class Merged(msgspec.Struct, frozen=True):
    """The digest of each bundle by model, the number of their units, and the number of blobs copied from each store."""

    bundles: dict[str, str]
    units: int
    copied: dict[str, int]


@dataclass(frozen=True)
class _Piece:
    """One variant, as an artifact of its own: the store that holds its blobs, and the unit's record if there is one."""

    store: Store
    artifact: BuiltArtifact
    record: UnitRecord | None = None

    @property
    def key(self) -> str:
        return self.artifact.variants[0].key

    @property
    def name(self) -> str:
        artifact = self.artifact
        (variant,) = artifact.variants
        return f"{artifact.model} {part_name(variant.region, variant.bucket)} {artifact.target}"


def merge_stores(sources: Sequence[Path], into: Path, tag: str) -> Merged:
    """Publish under `tag` the units that shards built for it (`--shard`), and other stores' bundles with that tag.

    Everything is checked before anything is written: every planned unit must be in one of the stores, and no two stores
    may hold different variants of one unit, or different models of one name. Blobs are copied and checked first, tags
    are set last.

    Raises BuildError with an issue for each such unit or difference, or for a store that has nothing under the tag;
    NotFoundError for a folder that is not a store; CorruptError, StoreError.
    """
    stores = [Store.open(path) for path in dict.fromkeys(path.resolve() for path in sources)]
    plans = [(store, plan) for store in stores if (plan := read_plan(store, tag)) is not None]
    planned = [store for store, _ in plans]
    pieces = [
        *_planned_pieces(plans, stores, tag),
        *(piece for store in stores if store not in planned for piece in _bundled_pieces(store, tag)),
    ]
    models = _without_repeats(pieces)
    artifacts = {model: merge(piece.artifact for piece in group) for model, group in models.items()}
    for merged in artifacts.values():
        _check_one_model(merged)
    target = Store.create(into)
    with target.writing("aotc merge"):
        copied = _copy(target, [piece for group in models.values() for piece in group])
        created = source_date()
        bundles = {model: publish(target, model, tag, artifacts[model], created=created) for model in models}
    return Merged(bundles, sum(map(len, models.values())), copied)


# -- finding the pieces -----------------------------------------------------------------------------------------------


def _planned_pieces(plans: Sequence[tuple[Store, ShardPlan]], stores: Sequence[Store], tag: str) -> Iterator[_Piece]:
    """Each unit of the shards' plans, from the first store that holds it. Raises BuildError for a unit in no store."""
    wanted: dict[str, tuple[PlannedKey, ShardPlan]] = {}
    issues = []
    for _, plan in plans:
        for unit in plan.units:
            known, _ = wanted.setdefault(unit.unit, (unit, plan))
            if known.key != unit.key:
                issues.append(_other_inputs(unit.unit, known.key, unit.key, stores))
    if issues:
        raise BuildError(
            f"the shards were planned from different inputs; {len({issue.message for issue in issues})} units differ",
            hint="build all shards from one commit, with one image and one environment",
            issues=tuple(dict.fromkeys(issues)),
        )
    found = {name: _find(unit.key, stores) for name, (unit, _) in wanted.items()}
    if missing := [wanted[name] for name, piece in found.items() if piece is None]:
        raise BuildError(
            f"{len(missing)} of the {len(wanted)} units planned for `{tag}` are in none of the stores",
            hint="build those shards again, or name their stores too; nothing was published",
            issues=tuple(
                Issue(f"{unit.unit} (shard {unit.shard}/{plan.shards})", expected=unit.key) for unit, plan in missing
            ),
        )
    pieces = {name: piece for name, piece in found.items() if piece is not None}
    if others := [(name, piece) for name, piece in pieces.items() if piece.name != name]:
        raise BuildError(
            f"{len(others)} of the units planned for `{tag}` are stored under the key of another unit",
            hint="build those shards again; nothing was published",
            issues=tuple(
                Issue(f"{name} is {piece.name} in {piece.store.path}", expected=name, actual=piece.name)
                for name, piece in others
            ),
        )
    yield from pieces.values()


def _find(key: str, stores: Iterable[Store]) -> _Piece | None:
    for store in stores:
        if (record := find_unit(store, key)) is not None:
            return _Piece(store, record.artifact, record)
    return None


def _other_inputs(name: str, one: str, other: str, stores: Sequence[Store]) -> Issue:
    records = [piece.record for key in (one, other) if (piece := _find(key, stores)) and piece.record]
    reasons = explain(records[0].factors, records[1].factors) if len(records) == 2 else []
    why = "; ".join(reason.message for reason in reasons)
    return Issue(f"{name}: {why}" if why else name, expected=one, actual=other)


def _bundled_pieces(store: Store, tag: str) -> Iterator[_Piece]:
    """Each variant of the store's bundles with that tag. Raises BuildError if there is none or a blob is missing."""
    entries = [entry for entry in store.tags() if entry.tag == tag]
    if not entries:
        raise BuildError(
            f"{store.path} has no bundle with the tag `{tag}`, and no shard was built into it for that tag",
            hint=f"its tags are {', '.join(map(str, store.tags())) or 'none'}; name another with --tag",
        )
    for entry in entries:
        bundle = read_bundle(store, Reference(None, entry.model, tag=tag))
        for one in bundle.artifacts:
            artifact = read_built(store, one)
            if missing := missing_files(store.blobs, artifact):
                raise BuildError(
                    f"{len(missing)} blobs of {entry} are missing in {store.path}, the first is {missing[0].blob}",
                    hint="fetch or build that bundle again",
                )
            for number in range(len(artifact.variants)):
                first, *kinds = (
                    msgspec.structs.replace(kind, variants=(kind.variants[number],), native=None)
                    for kind in (artifact, *artifact.kinds)
                )
                yield _Piece(store, msgspec.structs.replace(first, kinds=tuple(kinds)))


def _without_repeats(pieces: Iterable[_Piece]) -> dict[str, list[_Piece]]:
    """The pieces of each model, each unit once. Raises BuildError where two stores' variants of a unit differ."""
    models: dict[str, dict[str, _Piece]] = {}
    issues = []
    for piece in pieces:
        known = models.setdefault(piece.artifact.model, {}).setdefault(piece.name, piece)
        if known.artifact.variants != piece.artifact.variants:
            places = (str(known.store.path), str(piece.store.path))
            issues.append(Issue(f"{piece.name}: one variant in {places[0]}, another in {places[1]}", "", *places))
    if issues:
        raise BuildError(
            f"{len(issues)} units are in several of the stores, with different variants",
            hint="leave out the store whose units are not wanted, or `aotc pull --target` only the wanted targets; "
            "nothing was published",
            issues=tuple(issues),
        )
    return {model: list(named.values()) for model, named in models.items()}


def _check_one_model(artifacts: Sequence[BuiltArtifact]) -> None:
    """Raises BuildError unless the artifacts for several targets are of one model: same class, source files, parameters
    and buffers. Attributes and dtypes may depend on the target."""
    first = artifacts[0]
    for other in artifacts[1:]:
        if issues := [*_other_classes(first, other), *_other_files(first, other), *_other_state(first, other)]:
            raise BuildError(
                f"the artifacts of `{first.model}` for {first.target} and for {other.target} are of different models",
                hint="build both from one commit, or give one of the models another name; nothing was published",
                issues=tuple(issues),
            )


def _other_classes(one: BuiltArtifact, other: BuiltArtifact) -> Iterator[Issue]:
    names = one.module.class_name, other.module.class_name
    if not one.regions and not other.regions and names[0] != names[1]:
        yield Issue(f"the class is {names[0]} in one, {names[1]} in the other", "", *names)


def _other_files(one: BuiltArtifact, other: BuiltArtifact) -> Iterator[Issue]:
    """Files that differ. Installed packages may differ, and modules that one process did not import are unknown."""
    files = [{**each.module.sources, **each.module.imports} for each in (one, other)]
    for name in sorted(files[0].keys() & files[1].keys()):
        both = files[0][name], files[1][name]
        if both[0] != both[1] and all(text.startswith(BY_DIGEST) for text in both):
            yield Issue(f"the source of {name} is not the same", "", *both)


def _other_state(one: BuiltArtifact, other: BuiltArtifact) -> Iterator[Issue]:
    """Parameters and buffers that differ. Only whole models with live weights know all names; else names that both know
    are compared."""
    shapes = [_shapes(each) for each in (one, other)]
    whole = all(each.weights == "live" and not each.regions for each in (one, other))
    names = shapes[0].keys() | shapes[1].keys() if whole else shapes[0].keys() & shapes[1].keys()
    for name in sorted(names):
        both = shapes[0].get(name, "absent"), shapes[1].get(name, "absent")
        if both[0] != both[1] and ("absent" in both or "" not in both):
            yield Issue(f"{name} is {both[0]} in one, {both[1]} in the other", "", *both)


def _shapes(artifact: BuiltArtifact) -> dict[str, str]:
    """The shape of each parameter and buffer that a checkpoint holds; "" for one that no variant uses."""
    known = {
        name: str(list(spec.shape)) for spec in artifact.state if spec.persistent for name in (spec.name, *spec.aliases)
    }
    return {**dict.fromkeys(artifact.unused, ""), **known}


# -- copying ----------------------------------------------------------------------------------------------------------


def _copy(target: Store, pieces: Sequence[_Piece]) -> dict[str, int]:
    """Copy the blobs, then the units' records. Returns the number of new blobs from each store."""
    copied: dict[str, int] = {}
    for piece in pieces:
        for file in each_file(piece.artifact):
            blob = Blob(digest=file.blob, size=file.blob_size)
            new = target.blobs.put_copy(piece.store.blobs.path(file.blob), blob)
            copied[str(piece.store.path)] = copied.get(str(piece.store.path), 0) + new
        if piece.record is not None:
            put_unit(target, piece.record)
    return copied
