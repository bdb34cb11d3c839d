"""What a variant's report says: its kernels, and what was fused into them."""

from __future__ import annotations

from aotc.provenance import BuiltVariant, Report
from aotc.records import decode
from aotc.store.readable import Readable

REPORT_LIMIT = 64 << 20


def read_report(store: Readable, variant: BuiltVariant) -> Report | None:
    """The variant's kernels; None where its build recorded none. Raises NotFoundError, CorruptError, StoreError."""
    return None if variant.report is None else decode(store.blobs.load(variant.report, REPORT_LIMIT), Report)
