"""Advisories in a store: the feed, a signed document, and which advisories are of an artifact.

The feed is an image manifest of one layer, an `aotc.advisories.Feed`, which `index.json` calls `aotc.advisories`, as
the tag of a registry's repository does. It is signed as a bundle is, for the name `aotc:advisories`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from aotc.advisories import Feed, Hit, UnitFacts, decode_feed, hits, own_feed
from aotc.errors import CorruptError, NotFoundError, SignatureError
from aotc.provenance import BuiltArtifact, BuiltVariant, Report
from aotc.records import Artifact, SizeRange, part_name
from aotc.store.layout.built import read_report, with_provenance
from aotc.store.layout.store import Store
from aotc.store.opening import open_readable, open_transfer
from aotc.store.readable import ReadableStore
from aotc.store.reference import Reference, is_remote
from aotc.store.remote.push import change_attachment, push_signatures
from aotc.store.signing.attachments import DocumentKind, Layer, encode_layers, read_layers, reader_of, write_attached
from aotc.store.signing.keys import PrivateKey
from aotc.store.signing.signatures import Claims, SignedPayload, encode_payload, sign
from aotc.store.signing.trust import TrustedKeys, check_signatures

FEED = DocumentKind("advisories", "application/vnd.aotc.advisories.v1+json", 16 << 20, "feeds of advisories")
FEED_NAME = f"aotc.{FEED.suffix}"
SIGNED_AS = Reference(None, "aotc", tag=FEED.suffix)

_PUBLISH = "aotc audit --publish STORE --sign KEY"


# -- the feed ---------------------------------------------------------------------------------------------------------


def read_feed(where: str, trust: TrustedKeys | None) -> Feed:
    """The advisories that the store in a folder or at a URL has, with those of this aotc: of one that both have, what
    was modified last.

    A trusted key must have signed them: otherwise anyone who can write to the store could withdraw one. Raises
    SignatureError also where there are no trusted keys; NotFoundError, CorruptError, SchemaVersionError, StoreError.
    """
    if trust is None:
        raise SignatureError(
            f"the advisories in {where} are read only if a trusted key signed them, and no trusted keys are set",
            hint="name the key: --key FILE, aotc.Trust(keys=…), or $AOTC_TRUSTED_KEYS",
            reason="untrusted",
        )
    store = open_readable(where)
    found = store.attachment(FEED_NAME)
    if found is None:
        raise NotFoundError(
            f"{where} has no advisories", hint=f"publish them: {_PUBLISH.replace('STORE', where)}", known=()
        )
    read = reader_of(store)
    check_signatures(read, store.attachment, found.digest, SIGNED_AS, trust)
    layers = read_layers(read, found, FEED).layers
    if len(layers) != 1:
        raise CorruptError(
            f"{FEED_NAME} in {where} has {len(layers)} documents", hint=f"publish it again: {_PUBLISH}", expected="one"
        )
    return own_feed().with_newer(decode_feed(layers[0].data, f"{FEED_NAME} in {where}"))


def publish_feed(where: str, feed: Feed, key: PrivateKey, lifetime: float | None = None) -> str:
    """Put the feed in place of the one that the store in a folder or at a URL has, signed. Returns its digest.

    `lifetime` of the signature in seconds. Raises SignatureError, CorruptError, StoreError.
    """
    encoded = encode_layers(FEED, [Layer(feed.encode())], artifact_type=FEED.media_type)
    now = datetime.now(UTC)
    expires = None if lifetime is None else now + timedelta(seconds=lifetime)
    claims = Claims(encoded.descriptor.digest, "aotc/advisories", SIGNED_AS.name, now, expires)
    if is_remote(where):
        payload, transfer = encode_payload(claims), open_transfer(where)
        # The signature first: a reader of the feed finds it.
        push_signatures(transfer, claims.digest, [SignedPayload(payload, key.sign(payload))])
        change_attachment(
            transfer, FEED_NAME, lambda there: None if there and there.digest == claims.digest else encoded
        )
    else:
        store = Store(Path(where))
        sign(store, claims, key)
        store.change_attachment(FEED_NAME, lambda _: write_attached(store, encoded))
    return claims.digest


# -- which advisories are of an artifact ------------------------------------------------------------------------------


class UnitHit(NamedTuple):
    """A hit of the unit `unit`, which is named as `aotc inspect` names it, of an artifact; `key` is the unit's."""

    unit: str
    key: str
    hit: Hit


def artifact_hits(store: ReadableStore, record: Artifact, feed: Feed) -> Iterator[UnitHit]:
    """The advisories of each unit of an artifact, and of its further kinds of ranks. Raises NotFoundError,
    CorruptError, StoreError where provenance or a report cannot be read."""
    built = with_provenance(store, record)
    for one in (built, *built.kinds):
        for variant in one.variants:
            for hit in hits(feed, facts_of(one, variant, read_report(store, variant))):
                yield UnitHit(part_name(variant.region, variant.bucket), variant.key, hit)


def facts_of(artifact: BuiltArtifact, variant: BuiltVariant, report: Report | None) -> UnitFacts:
    ranges = any(isinstance(size, SizeRange) for size in variant.bucket.values())
    kinds = {"range": ranges, "frozen": artifact.weights == "frozen"}
    return UnitFacts(
        artifact.environment.torch,
        artifact.target.partition(":")[0],
        frozenset(name for name, holds in kinds.items() if holds),
        frozenset(report.patches) if report else None,
        report.operators if report else None,
    )
