"""What a store keeps of bundles whose tags were removed, and until when."""

from __future__ import annotations

from collections.abc import Sequence

from aotc.records import Record
from aotc.store.layout.bundle import each_file
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.store import Store
from aotc.store.layout.units import each_unit
from aotc.store.maintenance.reach import Reach, subject_of


class Unreached(Record, frozen=True):
    """Bytes of blobs that no tag reaches any more: `free` are removed by the next `aotc gc` after its grace period,
    `in_units` by one that also removes old units (`--older-than`)."""

    free: int = 0
    in_units: int = 0


def unreached(store: Store, gone: Sequence[Descriptor]) -> Unreached:
    """What entries that were taken out of `index.json` had reached, and no other entry does. Raises StoreError."""
    entries = store.entries()
    reach = Reach(store.blobs, entries)
    had = reach.reached(gone, _leave_out)
    kept = reach.reached([entry for entry in entries if not subject_of(entry)], _leave_out)
    sizes = {digest: store.blobs.size(digest) or 0 for digest in had.keys() - kept.keys()}
    units = {file.blob for unit in each_unit(store) for file in each_file(unit.artifact)} if sizes else set()
    in_units = sum(sizes[digest] for digest in sizes.keys() & units)
    return Unreached(sum(sizes.values()) - in_units, in_units)


def _leave_out(error: Exception) -> None:
    """A document that cannot be followed counts for nothing; gc and fsck report it."""
