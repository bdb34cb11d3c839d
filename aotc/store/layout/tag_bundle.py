"""Naming a bundle that a store on disk holds."""

from __future__ import annotations

from aotc.store.layout import oci
from aotc.store.layout.bundle import Bundle
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.store import Store


def tag_bundle(store: Store, bundle: Bundle, tag: str) -> None:
    """Let `model:tag` name the bundle, and mark it as sparse where the store lacks some of its artifacts.

    The caller holds `store.sharing()` since it looked whether the blobs are there. Raises NotFoundError where the
    bundle's own blob is gone, ReferenceFormatError, StoreError.
    """
    annotations = {oci.MODEL: bundle.model, **oci.created(bundle.created)}
    if not all(store.blobs.has(entry.digest, entry.size) for entry in bundle.artifacts):
        annotations[oci.SPARSE] = "true"
    size = store.blobs.size(bundle.digest) or 0
    store.set_tag(bundle.model, tag, Descriptor(oci.INDEX, bundle.digest, size, annotations=annotations))
