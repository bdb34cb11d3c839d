"""The store: an OCI image layout on disk, whose bytes `FORMAT.md` specifies. Imports neither torch nor yaml."""

from aotc.store.blobs import Blob, Blobs
from aotc.store.bundle import Bundle, BundleEntry, each_file, publish, read_artifact, read_bundle
from aotc.store.hot import HotCopies, default_hot_folder
from aotc.store.layout import Store, TagEntry
from aotc.store.readable import Readable, open_readable
from aotc.store.reference import Reference, parse_reference
from aotc.store.units import UnitRecord, find_unit, latest_unit, put_unit

__all__ = [
    "Blob",
    "Blobs",
    "Bundle",
    "BundleEntry",
    "HotCopies",
    "Readable",
    "Reference",
    "Store",
    "TagEntry",
    "UnitRecord",
    "default_hot_folder",
    "each_file",
    "find_unit",
    "latest_unit",
    "open_readable",
    "parse_reference",
    "publish",
    "put_unit",
    "read_artifact",
    "read_bundle",
]
