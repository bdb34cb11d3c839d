"""Which tags and units stay: the rules of `aotc gc`, without its hands."""

from __future__ import annotations

import datetime
import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aotc.errors import StoreError
from aotc.records import Record
from aotc.store import oci
from aotc.store.layout import as_tag
from aotc.store.oci import Descriptor

GRACE = 3600.0
"""Seconds for which what nothing names any more is kept for readers."""


class Policy(Record, frozen=True):
    """What may go. Ages and `grace` in seconds, sizes in bytes.

    older_than: units and logs not used for so long go; with `untag`, tags not published for so long too.
    max_size: the least recently used units go until the store is that small; with `untag`, then the oldest tags.
    untag: remove tags at all. Never those that match a pattern of `keep` (`model:tag`, with * and ?), nor those that
        name one of the `keep_last` bundles of their model that were published last (one, where nothing is said).
    """

    older_than: float | None = None
    max_size: int | None = None
    untag: bool = False
    keep: tuple[str, ...] = ()
    keep_last: int | None = None
    grace: float = GRACE


def check_policy(policy: Policy) -> None:
    """Raises StoreError where the rules contradict each other, or would remove more than somebody can mean."""
    said = (policy.older_than, policy.max_size, policy.keep_last)
    if policy.untag and not policy.keep and all(rule is None for rule in said):
        raise StoreError(
            "--untag needs a rule that says which tags go",
            hint="add --keep PATTERN, --keep-last N, --older-than AGE or --max-size SIZE",
        )
    if not policy.untag and (policy.keep or policy.keep_last is not None):
        raise StoreError(
            "--keep and --keep-last say which tags --untag leaves; without it every tag is kept",
            hint="add --untag to remove the others",
        )


@dataclass(frozen=True, eq=False)
class Holder:
    """A tag or a unit: what keeps blobs. `used` is when it was last used or published, seconds since the epoch."""

    name: str
    used: float
    may_go: bool
    size: int = 0
    path: Path | None = None
    entry: Descriptor | None = None


def tag_holders(
    entries: Iterable[Descriptor], policy: Policy, written: Mapping[str, float], created: Mapping[str, str]
) -> list[Holder]:
    """A holder for each entry of `index.json`.

    `written` says when blobs were written, which each publishing renews; `created` what bundles say of when they were
    made.
    """
    entries = list(entries)
    made = _times_made(entries, written, created)
    newest = _newest_bundles(entries, made, 1 if policy.keep_last is None else policy.keep_last)

    def may_go(entry: Descriptor) -> bool:
        return policy.untag and as_tag(entry) is not None and entry.digest not in newest and not _kept(entry, policy)

    return [
        Holder(
            name=entry.annotation(oci.REF_NAME),
            used=max(made[entry.digest], written.get(entry.digest, 0.0)),
            may_go=may_go(entry),
            entry=entry,
        )
        for entry in entries
    ]


def why_expired(holder: Holder, policy: Policy, now: float) -> str:
    """The rule of age, or of what to keep, by which the holder goes; "" if it stays."""
    if not holder.may_go:
        return ""
    if policy.older_than is not None:
        return "not used for that long" if holder.used < now - policy.older_than else ""
    return "not among those to keep" if holder.entry is not None and policy.max_size is None else ""


class Ledger:
    """How many holders have each blob, and the bytes of all."""

    def __init__(self, held: Mapping[Holder, Iterable[str]], sizes: Mapping[str, int]) -> None:
        self._held = {holder: frozenset(blobs) for holder, blobs in held.items()}
        self._sizes = sizes
        self._counts = Counter(digest for blobs in self._held.values() for digest in blobs)
        self.total = sum(sizes.get(digest, 0) for digest in self._counts) + sum(holder.size for holder in held)

    def frees(self, holder: Holder) -> int:
        """The bytes of the blobs that this holder alone has."""
        return sum(self._sizes.get(digest, 0) for digest in self._held[holder] if self._counts[digest] == 1)

    def drop(self, holder: Holder) -> None:
        self.total -= self.frees(holder) + holder.size
        self._counts.subtract(self._held.pop(holder))

    def oldest(self) -> list[Holder]:
        """Those that may go, the least recently used first."""
        return sorted((one for one in self._held if one.may_go), key=lambda one: (one.used, one.name))


def shrink(ledger: Ledger, limit: int) -> list[Holder]:
    """Drop holders until the limit is kept or none may go: units that free something, and only then tags."""
    dropped = _shrink_units(ledger, limit)
    for holder in ledger.oldest():
        if ledger.total > limit and holder.entry is not None:
            ledger.drop(holder)
            dropped += [holder, *_shrink_units(ledger, limit)]
    return dropped


def _shrink_units(ledger: Ledger, limit: int) -> list[Holder]:
    dropped = []
    for holder in ledger.oldest():
        if ledger.total > limit and holder.entry is None and ledger.frees(holder):
            ledger.drop(holder)
            dropped.append(holder)
    return dropped


def _times_made(
    entries: Iterable[Descriptor], written: Mapping[str, float], created: Mapping[str, str]
) -> dict[str, float]:
    """When what the entries name was made, by digest: as it says itself, else its entry; else when it was written."""
    made: dict[str, float] = {}
    for entry in entries:
        said = _seconds(created.get(entry.digest) or entry.annotation(oci.CREATED))
        made[entry.digest] = max(said or written.get(entry.digest, 0.0), made.get(entry.digest, 0.0))
    return made


def _newest_bundles(entries: Sequence[Descriptor], made: Mapping[str, float], count: int) -> set[str]:
    """The digests of the bundles of each model to which a tag was set last.

    aotc puts a tag that is set at the end of `index.json`. Entries that another tool copied (without the annotation
    `dev.aotc.model`) may be in any order: among them the time when their bundles were made counts.
    """
    copied = [place for place, entry in enumerate(entries) if not entry.annotation(oci.MODEL)]
    in_order = dict(zip(copied, sorted(copied, key=lambda place: made[entries[place].digest]), strict=True))
    models: dict[str, dict[str, None]] = {}
    for place in reversed(range(len(entries))):
        if (tag := as_tag(entries[in_order.get(place, place)])) is not None:
            models.setdefault(tag.model, {}).setdefault(tag.digest)
    return {digest for bundles in models.values() for digest in list(bundles)[:count]}


def _kept(entry: Descriptor, policy: Policy) -> bool:
    return any(fnmatch.fnmatchcase(entry.annotation(oci.REF_NAME), pattern) for pattern in policy.keep)


def _seconds(created: str) -> float:
    """Seconds since the epoch; 0 for what is no time."""
    try:
        return datetime.datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0
