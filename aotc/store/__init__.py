"""The store: an OCI image layout on disk, whose bytes `FORMAT.md` specifies. Imports neither torch nor yaml.

Names are imported with their first use, so that a service imports what loading needs and no more.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aotc.store.layout.blob_reader import Blob
    from aotc.store.layout.blobs import Blobs
    from aotc.store.layout.built import read_built
    from aotc.store.layout.bundle import Bundle, BundleEntry, each_file, read_artifact, read_bundle
    from aotc.store.layout.publishing import publish
    from aotc.store.layout.reader import TagEntry
    from aotc.store.layout.store import Store
    from aotc.store.layout.units import (
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
    from aotc.store.opening import open_readable
    from aotc.store.readable import Readable
    from aotc.store.reference import Reference, parse_reference
    from aotc.store.signing.attachments import reader_of
    from aotc.store.signing.keys import generate_key_pair, read_private_key, read_public_keys
    from aotc.store.signing.signatures import (
        Claims,
        add_signatures,
        fetch_signatures,
        read_signatures,
        sign,
        signature_tag,
        signatures_of,
    )
    from aotc.store.signing.trust import Trust, check_signatures, look_at_signatures, read_trust, read_trusted

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
    "Blob": "aotc.store.layout.blob_reader",
    "Blobs": "aotc.store.layout.blobs",
    "Bundle": "aotc.store.layout.bundle",
    "BundleEntry": "aotc.store.layout.bundle",
    "Claims": "aotc.store.signing.signatures",
    "Readable": "aotc.store.readable",
    "Reference": "aotc.store.reference",
    "Shared": "aotc.store.layout.units",
    "StageCost": "aotc.store.layout.units",
    "Store": "aotc.store.layout.store",
    "TagEntry": "aotc.store.layout.reader",
    "Trust": "aotc.store.signing.trust",
    "UnitCost": "aotc.store.layout.units",
    "UnitRecord": "aotc.store.layout.units",
    "add_signatures": "aotc.store.signing.signatures",
    "check_signatures": "aotc.store.signing.trust",
    "each_file": "aotc.store.layout.bundle",
    "fetch_signatures": "aotc.store.signing.signatures",
    "find_built": "aotc.store.layout.units",
    "find_unit": "aotc.store.layout.units",
    "generate_key_pair": "aotc.store.signing.keys",
    "latest_unit": "aotc.store.layout.units",
    "look_at_signatures": "aotc.store.signing.trust",
    "open_readable": "aotc.store.opening",
    "parse_reference": "aotc.store.reference",
    "publish": "aotc.store.layout.publishing",
    "put_unit": "aotc.store.layout.units",
    "read_artifact": "aotc.store.layout.bundle",
    "read_built": "aotc.store.layout.built",
    "read_bundle": "aotc.store.layout.bundle",
    "read_private_key": "aotc.store.signing.keys",
    "read_public_keys": "aotc.store.signing.keys",
    "read_signatures": "aotc.store.signing.signatures",
    "read_trust": "aotc.store.signing.trust",
    "read_trusted": "aotc.store.signing.trust",
    "reader_of": "aotc.store.signing.attachments",
    "sign": "aotc.store.signing.signatures",
    "signature_tag": "aotc.store.signing.signatures",
    "signatures_of": "aotc.store.signing.signatures",
    "unit_costs": "aotc.store.layout.units",
    "use_unit": "aotc.store.layout.units",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'aotc.store' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
