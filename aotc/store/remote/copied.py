"""Parts that push and fetch share: their report, and the check that a bundle is complete before a tag names it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aotc.errors import NotFoundError
from aotc.records import Record
from aotc.store.layout.blobs import Blob
from aotc.store.layout.bundle import BundleEntry
from aotc.store.layout.oci import ImageManifest
from aotc.store.layout.store import Store
from aotc.store.reference import Reference
from aotc.store.remote.transfer import Transfer


class Copied(Record, frozen=True):
    """The result of a push or fetch.

    `blobs` of `size` bytes belong to the artifacts, documents not counted; `moved` of them were not there yet.
    `requests`, `received` and `sent` (bytes of bodies) are what went over the network.
    """

    reference: str
    digest: str
    targets: tuple[str, ...]
    blobs: int
    size: int
    moved: int
    requests: int
    received: int
    sent: int
    seconds: float


def blobs_of(manifests: Sequence[ImageManifest], *, configs: bool = True) -> list[Blob]:
    """Every blob that the manifests name, once."""
    named = [one for manifest in manifests for one in (*((manifest.config,) if configs else ()), *manifest.layers)]
    return list({one.digest: Blob(digest=one.digest, size=one.size) for one in named}.values())


def check_whole(store: Store, digest: str, blobs: Sequence[Blob]) -> None:
    """Before a tag names the bundle with that digest, here or there. Raises NotFoundError."""
    missing = [blob.digest for blob in blobs if not store.blobs.has(blob.digest, blob.size)]
    if missing:
        raise NotFoundError(
            f"{len(missing)} of the blobs of {digest} are not in {store.path}, the first is {missing[0]}",
            hint="build or fetch the bundle again",
            known=(),
            digest=missing[0],
        )


def copied(
    transfer: Transfer,
    reference: Reference,
    digest: str,
    entries: Sequence[BundleEntry],
    blobs: Sequence[Blob],
    moved: int,
    began: float,
) -> Copied:
    traffic = transfer.traffic
    return Copied(
        reference=str(reference),
        digest=digest,
        targets=tuple(entry.target for entry in entries),
        blobs=len(blobs),
        size=sum(blob.size for blob in blobs),
        moved=moved,
        requests=traffic.requests,
        received=traffic.received,
        sent=traffic.sent,
        seconds=round(time.monotonic() - began, 3),
    )
