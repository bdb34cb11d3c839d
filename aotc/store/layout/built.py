"""Artifacts as they were built: the record, which a load reads, joined with the provenance, which no load reads."""

from __future__ import annotations

import msgspec

from aotc.errors import CorruptError
from aotc.picks import PICKS_LIMIT, UnitPicks, decode_picks, launch_pick
from aotc.provenance import PROVENANCE_LIMIT, REPORT_LIMIT, BuiltArtifact, BuiltVariant, Provenance, Report
from aotc.records import Artifact, decode
from aotc.store.layout.bundle import BundleEntry, read_artifact
from aotc.store.readable import ReadableStore


def read_built(store: ReadableStore, artifact: BundleEntry | str) -> BuiltArtifact:
    """An artifact of a bundle with its provenance. Raises the errors of `read_artifact`."""
    return with_provenance(store, read_artifact(store, artifact))


def with_provenance(store: ReadableStore, record: Artifact) -> BuiltArtifact:
    """Raises NotFoundError, CorruptError, StoreError."""
    if record.provenance is None:
        raise CorruptError(
            f"the record of `{record.model}` for {record.target} names no provenance",
            hint="it was not written by `aotc build`: build it again",
            expected="a file",
            actual="nothing",
        )
    built = decode(store.blobs.load(record.provenance, PROVENANCE_LIMIT), Provenance).join(record)
    return msgspec.structs.replace(built, kinds=tuple(with_provenance(store, kind) for kind in record.kinds))


def read_report(store: ReadableStore, variant: BuiltVariant) -> Report | None:
    """A variant's kernels, operators and patches; None where its build recorded none. Raises NotFoundError,
    CorruptError, StoreError."""
    return None if variant.report is None else decode(store.blobs.load(variant.report, REPORT_LIMIT), Report)


def read_picks(store: ReadableStore, variant: BuiltVariant) -> UnitPicks | None:
    """A variant's picks and its launch mode; None where none were recorded. Raises NotFoundError, CorruptError,
    SchemaVersionError, StoreError."""
    if variant.picks is None:
        return None
    units = decode_picks(store.blobs.load(variant.picks, PICKS_LIMIT), f"the picks {variant.picks.blob}").units
    if len(units) != 1:
        raise CorruptError(
            f"the picks {variant.picks.blob} are those of {len(units)} units",
            hint="build the unit again",
            expected="1",
            actual=str(len(units)),
        )
    (unit,) = units
    launch = launch_pick(variant.launch)
    return msgspec.structs.replace(unit, picks=(*unit.picks, launch)) if launch else unit
