"""Advisories: what an artifact that was built without a patch of torch may do wrong, as data.

An advisory is a record of OSV (https://ossf.github.io/osv-schema/), and has a `Concern`: which units it is of. A `Feed`
is a list of advisories. `OWN` is that of this aotc, which a newer one replaces (`Feed.with_newer`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from aotc.errors import CorruptError, SchemaVersionError

OWN = Path(__file__).with_name("advisories.json")
"""The advisories of the patches that this aotc has, or had."""

FEED_VERSION = 1
OSV_VERSION = "1.6.6"

_MANY_BYTES = 500


KINDS = frozenset({"range", "frozen"})
"""Kinds of units: of a bucket with a range of sizes; of a model with frozen weights."""


class Osv(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the parts of a feed. Fields that this aotc does not know are left out: OSV's records have many."""


class Concern(Osv, frozen=True):
    """Which units an advisory is of: those that were built without `patch`, with a torch within the bounds `torch`, for
    one of `devices`, whose graph has one of `operators` (beginnings of names; none: any) at one of `dtypes` (none:
    any), and which are of all kinds of `only`, see `KINDS`. Of units of a kind that this aotc does not know, it may be.

    `effect`: "silent", wrong values or foreign memory; "crash", the process ends, or a call fails.
    """

    patch: str
    effect: str
    torch: str = ">=2.11"
    devices: tuple[str, ...] = ("cpu", "cuda")
    operators: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


class Versions(Osv, frozen=True):
    """Of OSV: versions of a package, from `introduced` on and before `fixed`."""

    type: str
    events: tuple[dict[str, str], ...]


class Affected(Osv, frozen=True, kw_only=True):
    """Of OSV: the versions of aotc whose artifacts an advisory may concern."""

    package: dict[str, str] = {}
    ranges: tuple[Versions, ...] = ()
    database_specific: Concern


class OsvReference(Osv, frozen=True):
    """Of OSV."""

    type: str
    url: str


class Advisory(Osv, frozen=True, kw_only=True):
    """An OSV record. Times are like `2026-11-28T13:00:00Z`; one that is `withdrawn` concerns nothing."""

    schema_version: str = ""
    id: str
    published: str = ""
    modified: str
    withdrawn: str = ""
    summary: str = ""
    details: str = ""
    affected: tuple[Affected, ...]
    references: tuple[OsvReference, ...] = ()

    @property
    def fixed(self) -> str:
        """The first aotc with the patch; "" where it is not said."""
        events = (event for one in self.affected for versions in one.ranges for event in versions.events)
        return next((event["fixed"] for event in events if "fixed" in event), "")

    @property
    def concern(self) -> Concern:
        return self.affected[0].database_specific


class Feed(Osv, frozen=True):
    """Advisories, by their ids."""

    version: int
    advisories: tuple[Advisory, ...]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def with_newer(self, other: Feed) -> Feed:
        """The advisories of both; of one that is in both, what was modified last."""
        latest = {each.id: each for each in self.advisories}
        for each in other.advisories:
            if each.id not in latest or each.modified > latest[each.id].modified:
                latest[each.id] = each
        return Feed(FEED_VERSION, tuple(each for _, each in sorted(latest.items())))


def decode_feed(data: bytes, where: str) -> Feed:
    """Raises CorruptError, SchemaVersionError."""
    try:
        feed = msgspec.json.decode(data, type=Feed)
        for each in feed.advisories:
            within(each.concern.torch, "2.0")
    except (msgspec.DecodeError, IndexError, ValueError, RecursionError) as error:
        raise CorruptError(
            f"{where} is not a feed of advisories: {str(error)[:_MANY_BYTES]}",
            hint="publish it again: aotc audit --publish STORE --sign KEY",
            expected="advisories in OSV's form",
        ) from error
    if feed.version != FEED_VERSION:
        raise SchemaVersionError(
            f"{where} is a feed of version {feed.version}; this aotc reads {FEED_VERSION}",
            hint="audit with a newer aotc",
            found=feed.version,
            supported=FEED_VERSION,
        )
    return feed


def own_feed() -> Feed:
    """The advisories of this aotc."""
    return decode_feed(OWN.read_bytes(), OWN.name)


# -- which units an advisory is of ------------------------------------------------------------------------------------


class UnitFacts(NamedTuple):
    """What an advisory asks of a unit: the torch that built it, its device, its kinds (`Concern.only`), the names of
    its patches, and its graph's operators with the dtypes of what each takes and gives. None where patches or operators
    were not recorded."""

    torch: str
    device: str
    kinds: frozenset[str]
    patches: frozenset[str] | None
    operators: Mapping[str, tuple[str, ...]] | None


class Hit(NamedTuple):
    """An advisory that applies to a unit; with `sure=False` one that may, since not all is known that it asks of the
    unit. `operators` are those of the graph that the advisory names; none where it names none."""

    advisory: Advisory
    sure: bool
    operators: tuple[str, ...] = ()


def hits(feed: Feed, unit: UnitFacts) -> Iterator[Hit]:
    """The advisories that are of the unit."""
    for advisory in feed.advisories:
        concern = advisory.concern
        if (
            not advisory.withdrawn
            and concern.patch not in (unit.patches or ())
            and unit.device in concern.devices
            and unit.kinds.issuperset(KINDS.intersection(concern.only))
            and within(concern.torch, unit.torch)
        ):
            known = unit.patches is not None and KINDS.issuperset(concern.only)
            if not (concern.operators or concern.dtypes):
                yield Hit(advisory, known)
            elif unit.operators is None:
                yield Hit(advisory, False)
            elif found := tuple(names_concerned(concern, unit.operators)):
                yield Hit(advisory, known, found)


def names_concerned(concern: Concern, operators: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The operators of a graph that the advisory concerns."""
    for name, dtypes in operators.items():
        if name.startswith(concern.operators or "") and (not concern.dtypes or {*concern.dtypes} & {*dtypes}):
            yield name


# -- bounds of torch's versions ----------------------------------------------------------------------------------------


def within(bounds: str, version: str) -> bool:
    """Whether a torch version, by its major and minor, is within bounds like ">=2.11,<2.15". Raises ValueError."""
    own = release(version)
    for bound in bounds.split(","):
        least = release(bound[1:].lstrip("="))
        if (bound.startswith(">=") and own < least) or (bound.startswith("<") and own >= least):
            return False
    return True


def release(version: str) -> tuple[int, int]:
    """The major and minor of a version. Raises ValueError."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is not a version: it has no major and minor")
    return int(found[1]), int(found[2])
