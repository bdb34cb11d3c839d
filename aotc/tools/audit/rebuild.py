"""The commands that rebuild the artifacts which advisories concern."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from aotc.store.reference import parse_reference
from aotc.tools.audit.audit import Affection


def rebuild_commands(
    found: Sequence[Affection], manifest: Path, switched_off: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """One `aotc build` for each tag of a store, below comments that name the units, and what stands in the way.

    switched_off: of each model of the manifest, the patches that it switches off.

    What was referred to by a digest, or in a registry, is built into the default store under the tag `latest`: what is
    built has another digest, and a registry is pushed to.
    """
    by_place: dict[tuple[str, str], list[Affection]] = {}
    for each in found:
        reference = parse_reference(each.ref)
        store = "" if reference.in_registry else reference.store or ""
        by_place.setdefault((store, reference.tag or "latest"), []).append(each)
    for (store, tag), affections in by_place.items():
        units: dict[tuple[str, str, str], list[str]] = {}
        for each in affections:
            units.setdefault((each.model, each.target, each.unit), []).append(each.id)
        for (model, target, unit), ids in units.items():
            yield f"# {model} for {target}: {unit} ({', '.join(ids)})"
        for each in {(each.model, each.patch): each for each in affections}.values():
            if each.model not in switched_off:
                yield f"# {manifest} has no model `{each.model}`: build that from its own manifest"
            elif each.patch in switched_off[each.model]:
                yield f"# {manifest} switches `{each.patch}` off for `{each.model}`: remove that first"
        if models := dict.fromkeys(each.model for each in affections if each.model in switched_off):
            named = [part for model in models for part in ("--model", model)]
            into = ["--store", store] if store else []
            yield shlex.join(["aotc", "build", str(manifest), *into, "--tag", tag, *named])
