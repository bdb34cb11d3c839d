"""What a variant's own blobs say: its kernels, and its autotune picks."""

from __future__ import annotations

import msgspec

from aotc.errors import CorruptError, SchemaVersionError
from aotc.picks import PICKS_SCHEMA_VERSION, PickFile, UnitPicks
from aotc.records import Report, Variant, bucket_name, decode
from aotc.store import Store

BLOB_LIMIT = 256 << 20


class _SchemaHead(msgspec.Struct):
    schema: int


def read_report(store: Store, variant: Variant) -> Report | None:
    """The variant's kernels; None where its build recorded none. Raises NotFoundError, CorruptError, StoreError."""
    return None if variant.report is None else decode(store.blobs.load(variant.report, BLOB_LIMIT), Report)


def read_picks(store: Store, variant: Variant) -> UnitPicks | None:
    """The variant's autotune picks; None where its build recorded none.

    Raises SchemaVersionError for picks of another format version, CorruptError (also where they are not those of one
    unit), NotFoundError, StoreError.
    """
    if variant.picks is None:
        return None
    data = store.blobs.load(variant.picks, BLOB_LIMIT)
    found = decode(data, _SchemaHead).schema
    if found != PICKS_SCHEMA_VERSION:
        raise SchemaVersionError(
            f"the picks of bucket {bucket_name(variant.bucket)} have schema {found}; "
            f"this aotc reads schema {PICKS_SCHEMA_VERSION}",
            hint="read them with the aotc that built them, or rebuild with this one",
            found=found,
            supported=PICKS_SCHEMA_VERSION,
        )
    units = decode(data, PickFile).units
    if len(units) != 1 or any(pick.chosen not in range(len(pick.candidates)) for pick in units[0].picks):
        raise CorruptError(
            f"the picks of bucket {bucket_name(variant.bucket)} are not those of one unit, each with its candidate",
            hint="rebuild the unit",
            expected="one unit",
            actual=f"{len(units)} units",
        )
    return units[0]
