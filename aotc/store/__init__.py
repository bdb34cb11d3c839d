"""The store: an OCI image layout on disk, whose bytes `FORMAT.md` specifies. Imports neither torch nor yaml.

Names are imported with their first use, so that a service imports what loading needs and no more.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aotc.store.blob_reader import Blob
    from aotc.store.blobs import Blobs
    from aotc.store.built import read_built
    from aotc.store.bundle import Bundle, BundleEntry, each_file, read_artifact, read_bundle
    from aotc.store.keys import generate_key_pair, read_private_key, read_public_keys
    from aotc.store.layout import Store
    from aotc.store.opening import open_readable
    from aotc.store.publishing import publish
    from aotc.store.readable import Readable
    from aotc.store.reader import TagEntry
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
    "Readable",
    "Reference",
    "Shared",
    "StageCost",
    "Store",
    "TagEntry",
    "Trust",
    "UnitCost",
    "UnitRecord",
    "add_signatures",
    "check_signatures",
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
    "read_built",
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

_MODULES = {
    "Blob": "aotc.store.blob_reader",
    "Blobs": "aotc.store.blobs",
    "Bundle": "aotc.store.bundle",
    "BundleEntry": "aotc.store.bundle",
    "Claims": "aotc.store.signatures",
    "Readable": "aotc.store.readable",
    "Reference": "aotc.store.reference",
    "Shared": "aotc.store.units",
    "StageCost": "aotc.store.units",
    "Store": "aotc.store.layout",
    "TagEntry": "aotc.store.reader",
    "Trust": "aotc.store.trust",
    "UnitCost": "aotc.store.units",
    "UnitRecord": "aotc.store.units",
    "add_signatures": "aotc.store.signatures",
    "check_signatures": "aotc.store.trust",
    "each_file": "aotc.store.bundle",
    "fetch_signatures": "aotc.store.signatures",
    "find_built": "aotc.store.units",
    "find_unit": "aotc.store.units",
    "generate_key_pair": "aotc.store.keys",
    "latest_unit": "aotc.store.units",
    "look_at_signatures": "aotc.store.trust",
    "open_readable": "aotc.store.opening",
    "parse_reference": "aotc.store.reference",
    "publish": "aotc.store.publishing",
    "put_unit": "aotc.store.units",
    "read_artifact": "aotc.store.bundle",
    "read_built": "aotc.store.built",
    "read_bundle": "aotc.store.bundle",
    "read_private_key": "aotc.store.keys",
    "read_public_keys": "aotc.store.keys",
    "read_signatures": "aotc.store.signatures",
    "read_trust": "aotc.store.trust",
    "read_trusted": "aotc.store.trust",
    "reader_of": "aotc.store.signatures",
    "sign": "aotc.store.signatures",
    "signature_tag": "aotc.store.signatures",
    "signatures_of": "aotc.store.signatures",
    "unit_costs": "aotc.store.units",
    "use_unit": "aotc.store.units",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'aotc.store' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
