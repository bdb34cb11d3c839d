"""`aotc gc`: frees what nothing names, and by age or size what only makes builds quicker.

What is never removed: what a tag reaches, unless the caller's rules remove that tag; and what was written, used or
untagged within the grace period, or since the oldest running writer began (whichever is longer ago), with all that it
reaches. So readers need no lock: who has just read a tag has the grace period to finish.

gc holds `.aotc/gc.lock` alone. Killed at any point, it leaves a store that is whole: names go before what they name.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aotc.errors import AotcError, CorruptError, NotFoundError, SchemaVersionError, StoreError
from aotc.store import oci
from aotc.store.bundle import each_file
from aotc.store.disk import (
    files_in,
    fsync_folder,
    open_regular,
    read_limited,
    refuse_links,
    status_of,
    typed_errors,
    written_at,
)
from aotc.store.freed import Freed, Kind, Removal, remove_file, remove_tree, size_of_tree
from aotc.store.layout import FOLDERS, Store, as_tag
from aotc.store.leases import Lease
from aotc.store.leftovers import (
    WORK_FOLDER,
    dead_folders,
    dead_temporaries,
    stale_holder,
    unused_unit_locks,
)
from aotc.store.names import is_digest
from aotc.store.oci import Descriptor
from aotc.store.reach import Reach, arrows, ignore_flaw, subject_of
from aotc.store.retention import Holder, Ledger, Policy, check_policy, shrink, tag_holders, why_expired
from aotc.store.units import is_unit_file, read_unit, units_folder

LOCK_TIMEOUT = 60.0
"""Seconds to wait for writers that are just naming blobs, and for fsck."""

_TICK = 2.0  # seconds; the coarsest clock of a usual file system


def collect(
    store: Store, policy: Policy, *, dry_run: bool = False, timeout: float = LOCK_TIMEOUT, work: Path | None = None
) -> Freed:
    """Free what the policy allows; with `dry_run`, only say what would go, taking no lock and writing nothing.

    `work` is where killed builds left their work folders; else the temporary folder.

    Raises StoreError: the policy contradicts itself, the lock is not free within `timeout` seconds (it says who may
    hold it), the file system has no locks or cannot be written, a folder of the store is a link. CorruptError,
    NotFoundError, SchemaVersionError where a tag that stays cannot be followed, since what it reaches is not known;
    nothing is removed then.
    """
    check_policy(policy)
    refuse_links(store.path, FOLDERS)
    work = work or Path(tempfile.gettempdir())
    if dry_run:
        return _plan(store, policy, time.time(), work).result(store, dry_run=True)
    with store.alone(timeout):
        plan = _plan(store, policy, _clock(store), work)
        _carry_out(store, plan)
    return plan.result(store, dry_run=False)


def _clock(store: Store) -> float:
    """Now, by the clock that gives the files their times."""
    path = store.path / ".aotc" / "gc.lock"
    with typed_errors("write", path):
        os.utime(path)
        return path.stat().st_mtime


@dataclass(frozen=True)
class _Doomed:
    """Something that goes: an entry of `index.json`, or a path."""

    kind: Kind
    name: str
    reason: str
    size: int = 0
    path: Path | None = None
    entry: Descriptor | None = None


@dataclass(frozen=True)
class _Plan:
    doomed: list[_Doomed]
    kept: int
    waiting: int
    over: int
    writers: list[Lease]

    def result(self, store: Store, dry_run: bool) -> Freed:
        return Freed(
            folder=str(store.path),
            removed=tuple(Removal(one.kind, one.name, one.reason, one.size) for one in self.doomed),
            kept=self.kept,
            waiting=self.waiting,
            over=self.over,
            writers=tuple(writer.holder for writer in self.writers if writer.alive),
            dry_run=dry_run,
        )


@dataclass(frozen=True)
class _Blob:
    path: Path
    size: int
    written: float


def _plan(store: Store, policy: Policy, now: float, work: Path) -> _Plan:
    writers = store.writers()
    cutoff = min([now - policy.grace, *(_since(writer, now) for writer in writers if writer.alive)])
    blobs = dict(_each_blob(store))
    entries = store.entries()
    reach = Reach(store.blobs, entries)

    times = {digest: blob.written for digest, blob in blobs.items()}
    tags = tag_holders((entry for entry in entries if not subject_of(entry)), policy, times, _created(store, entries))
    units = dict(_units(store, cutoff))
    expired = {holder: why for holder in (*tags, *units) if (why := why_expired(holder, policy, now))}
    held = {holder: _holds(reach, holder, units) for holder in (*tags, *units) if holder not in expired}
    ledger = Ledger(held, {digest: blob.size for digest, blob in blobs.items()})
    dropped = shrink(ledger, policy.max_size) if policy.max_size is not None else []
    going = [_name(holder, why) for holder, why in expired.items()]
    going += [_name(holder, "over the size limit") for holder in dropped]

    live = frozenset[str]().union(*(held[holder] for holder in held if holder not in dropped))
    untagged = {one.entry.digest: now for one in going if one.entry is not None}  # somebody may have just read it
    young = {digest for digest, written in {**times, **untagged}.items() if written > cutoff and digest in blobs}
    spared = young.union(reach.reached(list(_documents(blobs, young)), ignore_flaw)) - live
    going += _orphans(entries, live | spared)
    garbage = [digest for digest in sorted(blobs) if digest not in live and digest not in spared]
    going += [_file(store, "blob", blobs[digest].path, "nothing names it", blobs[digest].size) for digest in garbage]
    going += _leftovers(store, writers, {one.path for one in going if one.path})
    going += _old_logs(store, policy, now, cutoff)
    going += [
        _Doomed("work folder", str(path), "its build was killed", size_of_tree(path), path)
        for path in dead_folders(work, WORK_FOLDER, cutoff)
    ]
    return _Plan(
        doomed=[one for one in going if one.kind == "work folder" or not _is_folder(one.path)],
        kept=ledger.total,
        waiting=sum(blobs[digest].size for digest in spared if digest in blobs),
        over=max(0, ledger.total - policy.max_size) if policy.max_size is not None else 0,
        writers=writers,
    )


def _since(writer: Lease, now: float) -> float:
    """From when on what a running writer wrote is spared: all of it, where the clock was set back since it began."""
    return writer.since - _TICK if writer.since <= now else 0.0


def _is_folder(path: Path | None) -> bool:
    """A folder where a file should be is nothing of aotc's: `aotc fsck` says so, and it stays."""
    return path is not None and path.is_dir() and not path.is_symlink()


def _each_blob(store: Store) -> Iterator[tuple[str, _Blob]]:
    for path in files_in(store.blobs.folder / "sha256"):
        if is_digest(f"sha256:{path.name}") and (status := status_of(path)) is not None:
            yield f"sha256:{path.name}", _Blob(path, status.st_size, written_at(path, status))


def _created(store: Store, entries: Iterable[Descriptor]) -> dict[str, str]:
    """What bundles say of when they were made, by digest; nothing of those that cannot be followed."""
    found: dict[str, str] = {}
    for digest in {tag.digest for entry in entries if (tag := as_tag(entry)) is not None}:
        with contextlib.suppress(CorruptError, NotFoundError, SchemaVersionError):
            index = oci.decode_index(store.blobs.read(digest, oci.MANIFEST_LIMIT), digest)
            found[digest] = index.annotation(oci.CREATED)
    return found


def _units(store: Store, cutoff: float) -> Iterator[tuple[Holder, frozenset[str]]]:
    """Every unit with the blobs that it names; none for a record that this aotc cannot use."""
    for path in files_in(units_folder(store)):
        if is_unit_file(path) and (status := status_of(path)) is not None:
            unit = read_unit(path)
            blobs = frozenset(file.blob for file in each_file(unit.artifact)) if unit else frozenset()
            used = written_at(path, status)
            yield Holder(path.name, used, used <= cutoff, status.st_size, path), blobs


def _holds(reach: Reach, holder: Holder, units: Mapping[Holder, frozenset[str]]) -> frozenset[str]:
    if holder.entry is None:
        return units[holder]

    def refuse(descriptor: Descriptor, error: StoreError) -> None:
        error.hint = (
            f"what {holder.name} reaches is not known, so nothing was removed: `aotc fsck` says what is wrong; build "
            "or pull it again, or let --untag remove it"
        )
        raise error

    return frozenset(reach.reached([holder.entry], refuse))


def _name(holder: Holder, why: str) -> _Doomed:
    if holder.entry is not None:
        return _Doomed("tag", holder.name, f"{why}; it named {holder.entry.digest}", entry=holder.entry)
    return _Doomed("unit", f".aotc/units/{holder.name}", why, holder.size, holder.path)


def _orphans(entries: Iterable[Descriptor], there: Collection[str]) -> list[_Doomed]:
    """Signatures and the like of what is gone."""
    return [
        _Doomed("signature", entry.annotation(oci.REF_NAME), f"{subject} is gone", entry=entry)
        for entry in entries
        if (subject := subject_of(entry)) and subject not in there and entry.digest not in there
    ]


def _documents(blobs: Mapping[str, _Blob], digests: Iterable[str]) -> Iterator[Descriptor]:
    """Those of the blobs that are an index or a manifest, by their bytes: nothing that names them says so any more."""
    for digest in digests:
        blob = blobs[digest]
        if blob.size <= oci.MANIFEST_LIMIT and _begins_like_json(blob.path):
            try:
                if arrows(read_limited(blob.path, oci.MANIFEST_LIMIT), digest):
                    yield Descriptor(media_type=oci.INDEX, digest=digest, size=blob.size)
            except (AotcError, OSError):
                continue  # a record


def _begins_like_json(path: Path) -> bool:
    try:
        with open_regular(path) as stream:
            return stream.read(1) == b"{"
    except (CorruptError, OSError):
        return False


def _file(store: Store, kind: Kind, path: Path, reason: str, size: int = 0) -> _Doomed:
    return _Doomed(kind, str(path.relative_to(store.path)), reason, size, path)


def _leftovers(store: Store, writers: Iterable[Lease], going: Collection[Path]) -> Iterator[_Doomed]:
    for path in dead_temporaries(store):
        if (status := status_of(path)) is not None:
            yield _file(store, "temporary", path, "its writer was killed", status.st_size)
    for writer in writers:
        if not writer.alive:
            yield _file(store, "lock", Path(writer.path), f"{writer.holder} was killed")
    if (holder := stale_holder(store)) is not None:
        yield _file(store, "lock", holder, "its holder was killed")
    if not any(writer.alive for writer in writers):  # a build locks its units, and none begins while gc runs
        for path in unused_unit_locks(store, going):
            yield _file(store, "lock", path, "its unit is gone")


def _old_logs(store: Store, policy: Policy, now: float, cutoff: float) -> Iterator[_Doomed]:
    if policy.older_than is None:
        return
    for path in files_in(store.path / ".aotc" / "logs"):
        status = status_of(path)
        if path.suffix == ".log" and status is not None and status.st_mtime < min(now - policy.older_than, cutoff):
            yield _file(store, "log", path, "not written for that long", status.st_size)


def _carry_out(store: Store, plan: _Plan) -> None:
    """`index.json`, then units, then bytes: whatever a kill leaves names nothing that is gone."""
    if entries := [one.entry for one in plan.doomed if one.entry is not None]:
        store.remove_entries(entries)
    units = [one.path for one in plan.doomed if one.path is not None and one.kind == "unit"]
    for path in units:
        remove_file(store.path, path)
    if units:
        with typed_errors("write in", units_folder(store)):
            fsync_folder(units_folder(store))
    for one in plan.doomed:
        if one.path is not None and one.kind == "work folder":
            remove_tree(one.path.parent, one.path)
        elif one.path is not None and one.kind != "unit":
            remove_file(store.path, one.path)
