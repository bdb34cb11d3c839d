"""Artifacts as they were built: the record, which a load reads, joined with the provenance, which no load reads."""

from __future__ import annotations

import msgspec

from aotc.errors import CorruptError
from aotc.provenance import PROVENANCE_LIMIT, BuiltArtifact, Provenance
from aotc.records import Artifact, decode
from aotc.store.layout.bundle import BundleEntry, read_artifact
from aotc.store.readable import Readable


def read_built(store: Readable, artifact: BundleEntry | str) -> BuiltArtifact:
    """An artifact of a bundle with its provenance. Raises the errors of `read_artifact`."""
    return with_provenance(store, read_artifact(store, artifact))


def with_provenance(store: Readable, record: Artifact) -> BuiltArtifact:
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
