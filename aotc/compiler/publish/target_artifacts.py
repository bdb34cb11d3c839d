"""Merge the units' artifacts into one artifact for each target, for the bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from aotc.errors import BuildError
from aotc.machine.elf import newest
from aotc.provenance import BuiltArtifact
from aotc.records import Environment, Region, StateSpec


def merge(artifacts: Iterable[BuiltArtifact]) -> list[BuiltArtifact]:
    """One artifact for each target, from artifacts of one variant each.

    Raises BuildError where two variants of a target differ in a field that they share (their sources changed between
    two plans).
    """
    by_target: dict[str, list[BuiltArtifact]] = {}
    for artifact in artifacts:
        by_target.setdefault(artifact.target, []).append(artifact)
    return [_merge_target(group) for group in by_target.values()]


def _merge_target(group: list[BuiltArtifact]) -> BuiltArtifact:
    """The artifact of the group; with further kinds where ranks run different code in any of its units."""
    parallel = group[0].parallel
    if parallel is None or not any(artifact.kinds for artifact in group):
        return _merge_alike(group)
    kinds: list[tuple[BuiltArtifact, list[int]]] = []
    for rank in range(parallel.size):
        own = [msgspec.structs.replace(one.of_rank(rank), parallel=parallel) for one in group]
        alike = _merge_alike(_with_own_signatures(own))
        if known := next((ranks for kind, ranks in kinds if kind == alike), None):
            known.append(rank)
        else:
            kinds.append((alike, [rank]))
    needs = _merge_needs([kind.environment for kind, _ in kinds])
    first, *others = (
        msgspec.structs.replace(kind, environment=needs, parallel=msgspec.structs.replace(parallel, ranks=tuple(ranks)))
        for kind, ranks in kinds
    )
    return msgspec.structs.replace(first, kinds=tuple(others))


def _with_own_signatures(units: Sequence[BuiltArtifact]) -> list[BuiltArtifact]:
    """The units of one rank, each region as its own units have it: ranks may share the code of one region, and call
    another one with inputs of other sizes."""
    signatures = {
        region.name: region.signature
        for unit in units
        for region in unit.regions
        if region.name == unit.variants[0].region
    }

    def own(region: Region) -> Region:
        return msgspec.structs.replace(region, signature=signatures.get(region.name, region.signature))

    return [msgspec.structs.replace(unit, regions=tuple(map(own, unit.regions))) for unit in units]


def _merge_alike(group: list[BuiltArtifact]) -> BuiltArtifact:
    first = group[0]
    imports = {name: text for artifact in group for name, text in artifact.module.imports.items()}
    trees = {text: tree for artifact in group for text, tree in artifact.module.trees.items()}
    for other in group[1:]:
        for name in ("signature", "weights", "ambient", "module", "regions", "calls"):
            if getattr(_common(other, imports), name) != getattr(_common(first, imports), name):
                raise BuildError(
                    f"two buckets of `{first.model}` were built with different {name}s",
                    hint="build again with --force",
                )
    state = _merge_state(first.model, [artifact.state for artifact in group])
    taken = {name for spec in state.values() for name in (spec.name, *spec.aliases)}
    return msgspec.structs.replace(
        first,
        environment=_merge_needs([artifact.environment for artifact in group]),
        state=tuple(state[name] for name in sorted(state)),
        module=msgspec.structs.replace(
            first.module, imports=dict(sorted(imports.items())), trees=dict(sorted(trees.items()))
        ),
        regions=_merge_regions(group),
        # A factory that gives other values at each call leaves no value to keep, which `load` reports.
        constants=first.constants if len({artifact.constants for artifact in group}) == 1 else None,
        unused=tuple(sorted({name for artifact in group for name in artifact.unused} - taken)),
        variants=tuple(variant for artifact in group for variant in artifact.variants),
        manifest=first.manifest if first.regions else {**first.manifest, "buckets": _buckets(group)},
    )


def _merge_needs(group: Sequence[Environment]) -> Environment:
    """What all variants need: of glibc and libstdc++ the newest version that one of them needs."""
    names = (name for needs in group for name in (f"GLIBC_{needs.libc}", *needs.libstdcxx))
    versions = newest(names)
    libc = versions.pop("GLIBC", "")
    libstdcxx = tuple(f"{family}_{version}" for family, version in sorted(versions.items()))
    return msgspec.structs.replace(group[0], libc=libc, libstdcxx=libstdcxx)


def _buckets(group: Sequence[BuiltArtifact]) -> list[Any]:
    return [msgspec.to_builtins(variant.bucket) for artifact in group for variant in artifact.variants]


def _merge_regions(group: Sequence[BuiltArtifact]) -> tuple[Region, ...]:
    """The regions, which are the same in all units, each with the state that the code of its own units uses."""
    merged = []
    for region in group[0].regions:
        states = [other.state for artifact in group for other in artifact.regions if other.name == region.name]
        state = _merge_state(f"{group[0].model} {region.name}", states)
        merged.append(msgspec.structs.replace(region, state=tuple(state[name] for name in sorted(state))))
    return tuple(merged)


def _merge_state(model: str, states: Iterable[Iterable[StateSpec]]) -> dict[str, StateSpec]:
    """The parameters and buffers by name. Raises BuildError where two units' records of one differ."""
    merged: dict[str, StateSpec] = {}
    for spec in (spec for state in states for spec in state):
        known = merged.setdefault(spec.name, spec)
        if fields := [name for name in spec.__struct_fields__ if getattr(spec, name) != getattr(known, name)]:
            one, other = (", ".join(f"{name} {getattr(each, name)}" for name in fields) for each in (known, spec))
            raise BuildError(
                f"two buckets of `{model}` were built with different weights: `{spec.name}` has {one} and {other}",
                hint="build all buckets from one model, with one file of weights",
            )
    return merged


def _common(artifact: BuiltArtifact, imports: Mapping[str, str]) -> BuiltArtifact:
    """The part to compare: without the state of regions, which differs by unit, and without comments of the model's
    code. Modules that the unit's process did not import are taken from the others' `imports`."""
    regions = tuple(msgspec.structs.replace(region, state=()) for region in artifact.regions)
    module = msgspec.structs.replace(artifact.module, imports={**imports, **artifact.module.imports}, trees={})
    return msgspec.structs.replace(artifact, regions=regions, module=module)
