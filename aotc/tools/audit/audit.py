"""The advisories that are of the artifacts of live tags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from aotc.advisories import Feed
from aotc.errors import RemoteError, StoreError
from aotc.records import Record
from aotc.store.advisory_feed import artifact_hits
from aotc.store.layout.bundle import BundleEntry, read_artifact, read_bundle
from aotc.store.opening import open_readable
from aotc.store.readable import ReadableStore
from aotc.store.reference import Reference, is_registry, is_remote, parse_reference


class Affection(Record, frozen=True):
    """An advisory that is of a unit of an artifact. `ref` is what a load takes, `unit` as `aotc inspect` names it.

    `effect`: "silent" (wrong values, or foreign memory) or "crash". `sure=False`: it may apply; what the advisory asks
    of the unit is not recorded. `operators`: those of the graph that the advisory names. `fixed`: the aotc with the
    patch.
    """

    ref: str
    digest: str
    model: str
    target: str
    unit: str
    key: str
    id: str
    effect: str
    patch: str
    summary: str
    fixed: str
    sure: bool = True
    operators: tuple[str, ...] = ()


class Audited(Record, frozen=True):
    """An artifact that was audited, or could not be read (`error`)."""

    ref: str
    digest: str
    target: str = ""
    error: str = ""


class Audit(NamedTuple):
    """The audited artifacts and the advisories that concern them, in the order of the references."""

    artifacts: tuple[Audited, ...]
    found: tuple[Affection, ...]

    @property
    def unread(self) -> list[Audited]:
        return [each for each in self.artifacts if each.error]


def audit(what: Sequence[str], feed: Feed, default_store: str) -> Audit:
    """The advisories of all live tags of the stores, and of the bundles of the references, among `what`.

    A store is a folder, or a URL without `#` that is not a registry's: those list no tags. A reference without
    store is of `default_store`. Artifacts that a host has not fetched are left out. Raises RemoteError where a remote
    is not reached, NotFoundError and ReferenceFormatError for what names nothing.
    """
    artifacts: list[Audited] = []
    found: list[Affection] = []
    for store, reference in (each for text in what for each in references(text, default_store)):
        where = "" if reference.in_registry else f"{reference.store}#"
        ref = f"{where}{reference.name}"
        try:
            bundle = read_bundle(store, reference)
            entries = [entry for entry in bundle.artifacts if not entry.is_cache and _is_there(store, entry)]
        except RemoteError:
            raise
        except StoreError as error:
            artifacts.append(Audited(ref, reference.digest or "", error=error.message))
            continue
        for entry in entries:
            try:
                found += _found(store, ref, bundle.digest, entry, feed)
            except RemoteError:
                raise
            except StoreError as error:
                artifacts.append(Audited(ref, bundle.digest, entry.target, error.message))
            else:
                artifacts.append(Audited(ref, bundle.digest, entry.target))
    return Audit(tuple(artifacts), tuple(found))


def references(text: str, default_store: str) -> Iterator[tuple[ReadableStore, Reference]]:
    """The tags of a store, or the one reference, each with its opened store."""
    if is_store(text):
        store = open_readable(text)
        for tag in store.tags():
            yield store, Reference(text, tag.model, tag=tag.tag)
        return
    reference = parse_reference(text)
    where = reference.store or default_store
    yield open_readable(where), Reference(where, reference.model, tag=reference.tag, digest=reference.digest)


def is_store(text: str) -> bool:
    """Whether the text names a store rather than a bundle."""
    if "#" in text or is_registry(text):
        return False
    return is_remote(text) or "/" in text or (Path(text) / "oci-layout").is_file()


def _is_there(store: ReadableStore, entry: BundleEntry) -> bool:
    """Whether the store has the artifact: a host fetches what it runs."""
    has = getattr(store.blobs, "has", None)
    return has is None or bool(has(entry.digest, entry.size))


def _found(store: ReadableStore, ref: str, digest: str, entry: BundleEntry, feed: Feed) -> Iterator[Affection]:
    for unit, key, hit in artifact_hits(store, read_artifact(store, entry), feed):
        advisory = hit.advisory
        yield Affection(
            ref,
            digest,
            model=entry.model,
            target=entry.target,
            unit=unit,
            key=key,
            id=advisory.id,
            effect=advisory.concern.effect,
            patch=advisory.concern.patch,
            summary=advisory.summary,
            fixed=advisory.fixed,
            sure=hit.sure,
            operators=hit.operators,
        )
