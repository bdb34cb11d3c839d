"""The store: an OCI image layout on disk, whose bytes `FORMAT.md` specifies. Imports neither torch nor yaml."""

from aotc.store.blobs import Blob, Blobs
from aotc.store.bundle import Bundle, BundleEntry, each_file, publish, read_artifact, read_bundle
from aotc.store.hot import HotCopies, default_hot_folder
from aotc.store.hot_sets import Source
from aotc.store.keys import generate_key_pair, read_private_key, read_public_keys
from aotc.store.layout import Store, TagEntry
from aotc.store.readable import Readable, open_readable
from aotc.store.reference import Reference, parse_reference
from aotc.store.signatures import (
    Claims,
    add_signatures,
    fetch_signatures,
    read_signatures,
    reader_of,
    sign,
    signature_tag,
    signatures_of,
)
from aotc.store.trust import Trust, check_signatures, look_at_signatures, read_trust, read_trusted
from aotc.store.units import (
    Shared,
    StageCost,
    UnitCost,
    UnitRecord,
    find_built,
    find_unit,
    latest_unit,
    put_unit,
    unit_costs,
    use_unit,
)

__all__ = [
    "Blob",
    "Blobs",
    "Bundle",
    "BundleEntry",
    "Claims",
    "HotCopies",
    "Readable",
    "Reference",
    "Shared",
    "Source",
    "StageCost",
    "Store",
    "TagEntry",
    "Trust",
    "UnitCost",
    "UnitRecord",
    "add_signatures",
    "check_signatures",
    "default_hot_folder",
    "each_file",
    "fetch_signatures",
    "find_built",
    "find_unit",
    "generate_key_pair",
    "latest_unit",
    "look_at_signatures",
    "open_readable",
    "parse_reference",
    "publish",
    "put_unit",
    "read_artifact",
    "read_bundle",
    "read_private_key",
    "read_public_keys",
    "read_signatures",
    "read_trust",
    "read_trusted",
    "reader_of",
    "sign",
    "signature_tag",
    "signatures_of",
    "unit_costs",
    "use_unit",
]
