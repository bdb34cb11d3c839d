"""Open or save a cache by its reference. A remote one goes through a local store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aotc.errors import ReferenceFormatError
from aotc.runtime.fetch import local_store
from aotc.store.layout.bundle import Bundle, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import DEFAULT_TAG, Reference, is_remote, parse_reference
from aotc.store.remote.fetching import fetch, of_targets
from aotc.store.remote.push import push
from aotc.store.remote.transfer import OnTransfer
from aotc.store.signing.trust import read_trust, read_trusted
from aotc.tools.caches.origin import Origin
from aotc.tools.caches.receipt import Receipt
from aotc.tools.caches.save import SavedCache, save


def reference_of(text: str, origin: Origin) -> Reference:
    """The reference, with the key of `origin` as its tag where the text has none. Raises ReferenceFormatError."""
    reference = parse_reference(text)
    if reference.tag == DEFAULT_TAG and not text.endswith(f":{DEFAULT_TAG}"):
        return Reference(reference.store, reference.model, tag=origin.tag())
    return reference


def opened(reference: Reference, where: str, on_event: OnTransfer | None = None) -> tuple[Store, Bundle]:
    """The store in a folder and the bundle, if it is signed as the trusted keys ask; of a remote, fetched first.

    Raises NotFoundError, SignatureError, RemoteError, StoreError, CorruptError.
    """
    trust = read_trust()
    if not is_remote(where):
        store = Store.open(Path(where))
        return store, read_trusted(store, reference, trust)
    source = Reference(where, reference.model, tag=reference.tag, digest=reference.digest)
    copied = fetch(source, local_store(), of_targets(), trust=trust, on_event=on_event)
    store = Store.open(local_store())
    return store, read_bundle(store, Reference(None, parse_reference(copied.reference).model, digest=copied.digest))


def save_as(
    reference: Reference,
    where: str,
    folders: Mapping[str, Path],
    origin: Origin,
    receipt: Receipt | None = None,
    on_event: OnTransfer | None = None,
) -> SavedCache:
    """As `save`, to the store `where`: a remote one gets what it lacks.

    Raises ReferenceFormatError for a digest, as `save`, and RemoteError.
    """
    if reference.tag is None:
        raise ReferenceFormatError(
            f"{reference} names a digest, which is not known before the cache is saved", hint="name a tag"
        )
    remote = is_remote(where)
    model = reference.model or where.rpartition("/")[2]
    named = Reference(None, model, tag=reference.tag)
    local = Store.create(local_store() if remote else Path(where))
    saved = save(local, named, folders, origin, receipt)
    if not remote:
        return saved
    destination = Reference(where, reference.model, tag=reference.tag)
    return saved._replace(reference=push(local, named, destination, on_event=on_event).reference)
