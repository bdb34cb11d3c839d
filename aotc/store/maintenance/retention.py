"""Which tags and units stay: the rules of `aotc gc`."""

from __future__ import annotations

import datetime
import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aotc.errors import StoreError
from aotc.records import Record
from aotc.store.layout import oci
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.tags import as_tag

GRACE = 3600.0
"""Seconds for which unreferenced blobs are kept for readers."""


class Policy(Record, frozen=True):
    """What a collection may remove. Ages and `grace` in seconds, sizes in bytes.

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
    """Raises StoreError where the rules contradict each other, or would remove more than a user can want."""
    if policy.untag and not policy.keep and policy.older_than is policy.max_size is policy.keep_last is None:
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
class RetentionRoot:
    """A tag (`entry`) or a unit: what keeps blobs. `used`: when it was last used or published, since the epoch."""

    name: str
    used: float
    may_go: bool
    size: int = 0
    entry: Descriptor | None = None


def tag_holders(entries: Iterable[Descriptor], written: Mapping[str, float], policy: Policy) -> list[RetentionRoot]:
    """A holder for each entry of `index.json`; `written` says when blobs were written, by digest."""

    def published(entry: Descriptor) -> float:
        """When the tag was set; of another tool's entry, which does not say it, when its bundle came here."""
        try:
            return datetime.datetime.fromisoformat(entry.annotation(oci.PUBLISHED)).timestamp()
        except (ValueError, OverflowError):
            return written.get(entry.digest, 0.0)

    ordered = sorted(entries, key=published)
    bundles: dict[str, dict[str, None]] = {}  # of each model, the last published first
    for entry in reversed(ordered):
        if (tag := as_tag(entry)) is not None:
            bundles.setdefault(tag.model, {}).setdefault(tag.digest)
    count = 1 if policy.keep_last is None else policy.keep_last
    newest = {digest for of_model in bundles.values() for digest in list(of_model)[:count]}

    def may_go(entry: Descriptor) -> bool:
        kept = any(fnmatch.fnmatchcase(entry.annotation(oci.REF_NAME), pattern) for pattern in policy.keep)
        return policy.untag and as_tag(entry) is not None and entry.digest not in newest and not kept

    return [
        RetentionRoot(entry.annotation(oci.REF_NAME), published(entry), may_go(entry), entry=entry) for entry in ordered
    ]


def why_expired(holder: RetentionRoot, policy: Policy, now: float) -> str:
    """The rule of age, or of what to keep, by which the holder goes; "" if it stays."""
    if holder.may_go and policy.older_than is not None:
        return "not used for that long" if holder.used < now - policy.older_than else ""
    return "not among those to keep" if holder.may_go and holder.entry and policy.max_size is None else ""


def shrink(
    held: Mapping[RetentionRoot, frozenset[str]], sizes: Mapping[str, int], limit: int | None
) -> tuple[set[RetentionRoot], int]:
    """Which holders go so that the rest takes at most `limit` bytes, and how many it takes.

    The least recently used first; units that free something, and only when there are none left, tags.
    """
    holders = Counter(digest for blobs in held.values() for digest in blobs)
    total = sum(sizes.get(digest, 0) for digest in holders) + sum(holder.size for holder in held)
    candidates = sorted(
        (one for one in held if one.may_go), key=lambda one: (one.entry is not None, one.used, one.name)
    )
    dropped: set[RetentionRoot] = set()

    def frees(holder: RetentionRoot) -> int:
        return sum(sizes.get(digest, 0) for digest in held[holder] if holders[digest] == 1)

    while limit is not None and total > limit:
        going = next((one for one in candidates if one not in dropped and (one.entry or frees(one))), None)
        if going is None:
            break
        total -= frees(going) + going.size
        holders.subtract(held[going])
        dropped.add(going)
    return dropped, total
