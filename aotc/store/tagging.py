"""Tags of a store, wherever it is: giving a bundle a further name, and taking a name away.

A tag is set and removed at once: a reader finds the bundle that was named, or the one that is. In a folder that is one
replacement of `index.json` under its lock, in object storage one conditional write, in a registry one request.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from aotc.errors import Issue, NotFoundError, ReferenceFormatError, SignatureError, StoreError
from aotc.records import Record
from aotc.store.layout import oci
from aotc.store.layout.bundle import Bundle, each_file, read_bundle
from aotc.store.layout.near_stores import nearest_first, not_found
from aotc.store.layout.oci import Descriptor, ImageManifest
from aotc.store.layout.publishing import tag_bundle
from aotc.store.layout.store import Store
from aotc.store.layout.tags import TagEntry, as_tag
from aotc.store.layout.units import each_unit
from aotc.store.maintenance.reach import Reach, subject_of
from aotc.store.opening import open_readable
from aotc.store.readable import Listable, ReadableStore
from aotc.store.reference import DEFAULT_TAG, Reference, is_remote, parse_reference
from aotc.store.remote.copied import blobs_of, check_whole
from aotc.store.remote.remote_store import RemoteStore
from aotc.store.signing.attachments import reader_of
from aotc.store.signing.trust import REASONS, SeenSignature, TrustedKeys, look_at_signatures, signed_names


class Tagged(Record, frozen=True):
    """A tag that was set: `name` names `digest` now, and named `before` ("" where the name is new).

    `left` says that no other tag of the store names `before`. `signing` is set where a load with trusted keys refuses
    the bundle under this name.
    """

    name: str
    digest: str
    before: str = ""
    left: bool = False
    signing: Issue | None = None


class Untagged(Record, frozen=True):
    """A tag that was removed. `others` are the tags that still name the bundle, `unreached` is what no tag reaches any
    more; None for a remote, which does not say it."""

    name: str
    digest: str
    others: tuple[str, ...] | None = None
    unreached: Unreached | None = None


# -- a further name ---------------------------------------------------------------------------------------------------


def set_tags(where: str, reference: Reference, names: Sequence[str], trust: TrustedKeys | None = None) -> list[Tagged]:
    """Let each of `names` name the bundle of `reference`, in the same store: the folder or URL `where`.

    A name is `TAG`, `MODEL:TAG`, or a whole reference. One that exists is moved. `trust` are the keys of the hint on
    signatures; nothing is refused for their sake.

    Raises ReferenceFormatError before anything is set where a name is not a tag of this model in this store;
    NotFoundError, also for a bundle of which a blob is missing; CorruptError, RemoteError, StoreError.
    """
    store = open_readable(where)
    bundle = read_bundle(store, reference)
    tags = [parse_tag(name, reference, bundle.model, where) for name in names]
    return [_set_tag(where, store, bundle, tag, trust) for tag in dict.fromkeys(tags)]


def parse_tag(text: str, reference: Reference, model: str, where: str) -> Reference:
    """The new name that `text` is for a bundle of `model`, which `reference` names. Raises ReferenceFormatError."""
    shown = f"{reference.store}:TAG" if reference.in_registry else f"{model}:TAG"
    if not any(sign in text for sign in ":#/@"):
        if text == model and not reference.in_registry:
            raise ReferenceFormatError(f"{text!r} is the model, and not a tag", hint=f"write {model}:latest")
        return Reference(reference.store, reference.model and model, tag=text)
    new = parse_reference(text)
    if new.tag is None:
        raise ReferenceFormatError(f"{text} is a digest, which cannot be given: it names bytes", hint=f"write {shown}")
    if new.store is not None and new.store != where:
        raise ReferenceFormatError(
            f"{text} is in another store than {reference.name}, which is in {where}",
            hint="`aotc push` and `aotc fetch` bring a bundle to another store, under the tag that they are given",
        )
    if new.model != reference.model:
        raise ReferenceFormatError(
            f"a bundle of the model {model!r} cannot be tagged as {text!r}", hint=f"write {shown}"
        )
    return Reference(reference.store, new.model, tag=new.tag)


def _set_tag(where: str, store: Listable, bundle: Bundle, new: Reference, trust: TrustedKeys | None) -> Tagged:
    try:
        before = open_readable(where).resolve(new).digest
    except NotFoundError:
        before = ""
    if before != bundle.digest:
        if isinstance(store, RemoteStore):
            remote, data = store.transfer.remote, store.blobs.read(bundle.digest, oci.MANIFEST_LIMIT)
            store.transfer.retrying(lambda: remote.set_tag(new, oci.INDEX, data))
        else:
            _tag_here(Store.open(where), bundle, str(new.tag))
    left = before not in ("", bundle.digest) and not new.in_registry and not _names_of(store, new.model, before)
    return Tagged(new.name, bundle.digest, before, left, signing_issue(store, where, bundle, new, before, trust))


def _tag_here(store: Store, bundle: Bundle, tag: str) -> None:
    """A bundle that a digest names may be the rest of what gc has removed: a tag names whole bundles."""
    with store.sharing():  # what was seen to be there stays there until the tag names it
        there = [entry for entry in bundle.artifacts if store.blobs.has(entry.digest, entry.size)]
        manifests = [oci.read_document(store.blobs, entry.digest, ImageManifest) for entry in there]
        check_whole(store, bundle.digest, blobs_of(manifests))
        if not there:
            raise NotFoundError(
                f"{store.path} holds no artifact of {bundle.digest} any more",
                hint="build or fetch the bundle again",
                known=(),
                digest=bundle.digest,
            )
        tag_bundle(store, bundle, tag)


def _names_of(store: Listable, model: str, digest: str) -> tuple[str, ...]:
    return tuple(str(entry) for entry in store.tags() if (entry.model, entry.digest) == (model, digest))


def tags_of(store: Listable, where: str, model: str) -> list[TagEntry]:
    """The tags of a model, the one that was set last first.

    Raises ReferenceFormatError for what is not a model's name, NotFoundError, CorruptError, RemoteError, StoreError.
    """
    if ":" in model or "@" in model:
        name = model.replace("@", ":").partition(":")[0]
        raise ReferenceFormatError(
            f"{model!r} is one bundle, and the tags of a model are listed",
            hint=f"write {name}; `aotc inspect {model}` shows the bundle",
        )
    wanted = Reference(None, model, tag=DEFAULT_TAG)
    entries = store.tags()
    found = [entry for entry in entries if entry.model == model]
    if not found:
        from aotc.store.layout.near_stores import what_it_is

        known = nearest_first(model, [*dict.fromkeys(entry.model for entry in entries)])
        raise NotFoundError(
            f"no bundle of {wanted.model} is in the store {where}",
            hint=what_it_is(model, known)
            or (f"there is {', '.join(known[:5])}" if known else "the store holds no bundle"),
            known=tuple(known),
        )
    return sorted(found, key=lambda entry: entry.published, reverse=True)


# -- what signatures say of the new name ------------------------------------------------------------------------------


def signing_issue(
    store: Listable, where: str, bundle: Bundle, new: Reference, before: str, trust: TrustedKeys | None
) -> Issue | None:
    """Why a load with trusted keys refuses the bundle under its new name; None where it does not, as far as is known.

    Without `trust`, signatures are taken at their word, and an unsigned bundle is not an issue. Raises StoreError.
    """
    seen = _signatures(store, bundle.digest, new, trust)
    names = signed_names(new.store, new.model, str(new.tag))
    good = [one for one in seen if _is_for(one, names, trust)]
    if not good:
        if not seen and trust is None:
            return None
        claimed = sorted({one.claims.name or "no name" for one in seen if one.claims})
        signed = f"signed for {', '.join(claimed)[:300]}" if claimed else "not signed"
        return Issue(
            f"the bundle is {signed}: with trusted keys, a load as {new.name} is refused",
            expected=f"signed for {' or '.join(names)}",
            actual=signed,
            hint=_sign_hint(where, bundle, new, names),
        )
    newest = _newest(good)
    earlier = [one for one in _signatures(store, before, new, trust) if _is_for(one, names, trust)] if before else []
    if earlier and (was := _newest(earlier)) > newest:
        return Issue(
            f"the bundle was signed for {new.name} at {newest:%FT%TZ}, the one before at {was:%FT%TZ}: "
            "with trusted keys, a host that has loaded that one refuses this one",
            expected=f"signed at or after {was:%FT%TZ}",
            actual=f"signed at {newest:%FT%TZ}",
            hint=_sign_hint(where, bundle, new, names),
        )
    return None


def check_signed_for(store: Store, bundle: Bundle, destination: Reference) -> None:
    """Raises SignatureError where a bundle that is signed is to be pushed under a name that it is not signed for.

    Signatures that the destination has already count, too. An unsigned bundle is not an error here.
    """
    issue = signing_issue(store, str(store.path), bundle, destination, "", None)
    if issue is None:
        return
    names = signed_names(destination.store, destination.model, str(destination.tag))
    there = _signatures(open_readable(str(destination.store)), bundle.digest, destination, None)
    if any(_is_for(one, names, None) for one in there):
        return
    raise SignatureError(
        f"{destination.name} cannot be pushed: {issue.message}",
        hint=f"{issue.hint}; or push it as it is, with --unsigned-name",
        digest=bundle.digest,
        expected=issue.expected,
        actual=issue.actual,
        reason="other-name",
    )


def _signatures(store: ReadableStore, digest: str, new: Reference, trust: TrustedKeys | None) -> list[SeenSignature]:
    return look_at_signatures(reader_of(store), store.attachment, digest, new, trust)


def _is_for(one: SeenSignature, names: Sequence[str], trust: TrustedKeys | None) -> bool:
    if one.claims is None or one.claims.name not in names or one.claims.signed is None:
        return False
    return trust is None or not one.flaw


def _newest(signatures: Sequence[SeenSignature]) -> datetime:
    times = [one.claims.signed for one in signatures if one.claims and one.claims.signed]
    return max(times).astimezone(UTC)


def signed_as(store: Listable, where: str, entry: TagEntry, trust: TrustedKeys | None) -> str:
    """What the signatures of a bundle say of its tag, in a word.

    "no" without any. With `trust` "trusted", else what is wrong with the best of them, as `SignatureError.reason` has
    it. Without, "unchecked" where one claims to be for this name, else "other-name". Raises StoreError.
    """
    name = Reference(where if is_remote(where) else None, entry.model, tag=entry.tag)
    seen = _signatures(store, entry.digest, name, trust)
    if not seen:
        return "no"
    if any(_is_for(one, signed_names(name.store, name.model, entry.tag), trust) for one in seen):
        return "unchecked" if trust is None else "trusted"
    return "other-name" if trust is None else max((one.flaw for one in seen), key=REASONS.index)


def _sign_hint(where: str, bundle: Bundle, new: Reference, names: Sequence[str]) -> str:
    if is_remote(where):
        source = where if new.in_registry else f"{where}#{bundle.model}"
        return (
            f"sign it for that name in a folder: `aotc fetch {source}@{bundle.digest} --all --store FOLDER`, "
            f"`aotc sign --store FOLDER {bundle.model}@{bundle.digest} --key KEY --as {names[0]}`, then `aotc push`"
        )
    signed = f"{shlex.quote(where)}#{bundle.model}@{bundle.digest}"
    return f"sign it for that name: aotc sign {signed} --key KEY --as {names[0]}"


# -- a name less ------------------------------------------------------------------------------------------------------


def remove_tag(where: str, reference: Reference) -> Untagged:
    """Remove a tag from the store in the folder, or at the URL, `where`; all that it names stays for `aotc gc`.

    Raises ReferenceFormatError for a digest, NotFoundError for a tag that is not there; StoreError, also for a remote
    that removes no tags; CorruptError, RemoteError.
    """
    if reference.tag is None:
        raise ReferenceFormatError(
            f"{reference} is a digest: bytes are removed by `aotc gc`, when no tag names them",
            hint="name the tags to remove; `aotc ls` lists them",
        )
    if not is_remote(where):
        return _untag_here(Store.open(Path(where)), reference)
    store = open_readable(where)
    assert isinstance(store, RemoteStore)
    digest, remote = store.resolve(reference).digest, store.transfer.remote
    store.transfer.retrying(lambda: remote.remove_tag(reference))
    others = None if reference.in_registry else _names_of(store, reference.model, digest)
    return Untagged(reference.name, digest, others)


def _untag_here(store: Store, reference: Reference) -> Untagged:
    """Also a tag that damage lets name several bundles, or that another writer moves meanwhile."""
    gone: list[tuple[TagEntry, Descriptor]] = []
    while found := [one for one in _tags(store) if str(one[0]) == reference.name]:
        store.remove_entries([entry for _, entry in found])
        gone += found
    if not gone:
        raise not_found(reference, [str(tag) for tag, _ in _tags(store)], str(store.path))
    others = tuple(sorted({name for tag, _ in gone for name in _names_of(store, tag.model, tag.digest)}))
    try:
        left = unreached(store, [entry for _, entry in gone])
    except StoreError:
        left = None  # the tag is gone all the same; what is wrong is for fsck
    return Untagged(reference.name, gone[-1][0].digest, others, left)


def _tags(store: Store) -> list[tuple[TagEntry, Descriptor]]:
    return [(tag, entry) for entry in store.entries() if (tag := as_tag(entry))]


# -- what a store keeps of bundles whose tags were removed -------------------------------------------------------------


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
