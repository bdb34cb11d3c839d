"""Put a compiled unit into the store: its files as blobs, its record under its key."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import msgspec

from aotc.compiler.messages import STAGE, Doing, FinishedUnit, OnProgress, StageCosts, Unit, span_here
from aotc.compiler.publish.unit_record import folder_of_kind
from aotc.provenance import BuiltArtifact
from aotc.records import File
from aotc.store.layout.blobs import Blob
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, put_unit


def store_unit(store: Store, unit: Unit, compiled: FinishedUnit, costs: StageCosts, tell: OnProgress) -> UnitRecord:
    """Put the unit's files into the store, and its record under its key. Raises StoreError."""
    artifact, folder, smoked = compiled.artifact, compiled.folder, compiled.smoked
    assert artifact is not None and folder is not None and smoked is not None
    began = time.time()
    tell(Doing("store"))
    artifact = store_files(store, artifact, folder)
    stored = span_here("store", STAGE, began, time.time())
    costs.add(stored)
    tell(stored)
    seconds = round(time.time() - costs.began, 3)
    autotuned = compiled.autotuned
    record = UnitRecord(
        unit.key,
        unit.factors,
        artifact,
        seconds,
        now(),
        autotuned.failed_candidates,
        costs.stages,
        smoked.cost,
        autotuned.shared,
        smoked.driver_compiled,
        smoked.times,
        autotuned.reused,
    )
    put_unit(store, record)
    return record


def store_files(store: Store, artifact: BuiltArtifact, folder: Path) -> BuiltArtifact:
    """Put the staged files of a one-variant artifact into the store. Returns the artifact with the blobs' names."""

    def put(file: File) -> File:
        if file.mapped:
            store.blobs.put_copy(folder / file.name, Blob(digest=file.blob, size=file.blob_size))
            return file
        return store.blobs.put_file_zstd(folder / file.name, name=file.name)

    (variant,) = artifact.variants
    attributes = artifact.module.attributes_file
    return msgspec.structs.replace(
        artifact,
        module=msgspec.structs.replace(artifact.module, attributes_file=put(attributes) if attributes else None),
        constants=put(artifact.constants) if artifact.constants else None,
        variants=(
            msgspec.structs.replace(
                variant,
                files=tuple(put(file) for file in variant.files),
                report=put(variant.report) if variant.report else None,
                read_values=put(variant.read_values) if variant.read_values else None,
                picks=put(variant.picks) if variant.picks else None,
            ),
        ),
        kinds=tuple(store_files(store, kind, folder_of_kind(folder, _first_rank(kind))) for kind in artifact.kinds),
    )


def _first_rank(kind: BuiltArtifact) -> int:
    assert kind.parallel is not None
    return kind.parallel.ranks[0]


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
