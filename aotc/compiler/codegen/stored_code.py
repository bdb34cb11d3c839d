"""The code of a finished unit with the same graph, in the place of a compilation."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from aotc.compiler.codegen.aot_inductor import CompiledFiles
from aotc.compiler.messages import Job
from aotc.errors import AotcError
from aotc.picks import PICKS_LIMIT, PickFile, decode_picks
from aotc.provenance import BuiltVariant, Report
from aotc.records import decode
from aotc.store.layout.bundle import CONFIG_LIMIT
from aotc.store.layout.store import Store
from aotc.store.layout.units import find_unit

_log = logging.getLogger("aotc")


class StoredCode(NamedTuple):
    """Its files, which are in the job's output folder now, and its picks. `unit` is the key of the unit."""

    unit: str
    files: CompiledFiles
    picks: PickFile | None
    untuned: tuple[str, ...]


def stored_code(job: Job, graph: str) -> StoredCode | None:
    """The code that `job.store` has of that `graph_key`; None where it has none that can be read."""
    key = job.graphs.get(graph)
    if key is None:
        return None
    try:
        store = Store.open(Path(job.store))
        unit = find_unit(store, key)
        artifacts = (unit.artifact, *unit.artifact.kinds) if unit else ()
        variants = (variant for artifact in artifacts for variant in artifact.variants if variant.graph == graph)
        variant = next(variants, None)
        return _taken(store, variant, key, Path(job.output)) if variant is not None else None
    except AotcError as error:
        _log.warning("the code of the unit %s cannot be taken: %s", key, error)
        return None


def _taken(store: Store, variant: BuiltVariant, key: str, output: Path) -> StoredCode:
    report, picks = Report((), 0), None
    if variant.report is not None:
        report = decode(store.blobs.load(variant.report, CONFIG_LIMIT), Report)
    if variant.picks is not None:
        picks = decode_picks(store.blobs.load(variant.picks, PICKS_LIMIT), f"the picks {variant.picks.blob}")
    try:
        for file in variant.files:
            store.blobs.extract(file, output / file.name)
    except AotcError:
        for file in variant.files:  # where a compilation puts its own
            (output / file.name).unlink(missing_ok=True)
        raise
    names = tuple(file.name for file in variant.files)
    mapped = tuple(file.name for file in variant.files if file.mapped)
    files = CompiledFiles(
        names,
        mapped,
        report.kernels,
        patches=report.patches,
        operators=report.operators,
        imports=variant.imports,
    )
    return StoredCode(key, files, picks, variant.untuned)
