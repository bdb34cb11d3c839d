"""`aotc gc`: removes unreferenced blobs, and by age or size the units, which only make builds quicker.

Mark: what a tag reaches, unless the caller's rules remove that tag; the blobs of units; and what was written, used or
untagged within the grace period, or since the oldest running writer began (whichever is longer ago), with all that it
reaches. So readers need no lock: a reader that has just read a tag has the grace period to finish.

Sweep: names go before what they name. Killed at any point, gc leaves a store that is whole. It holds `.aotc/gc.lock`
alone.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from aotc.errors import AotcError, StoreError
from aotc.store.files.disk import files_in, open_regular, status_of, typed_errors
from aotc.store.files.store_locks import is_held
from aotc.store.files.writing import fsync_folder, refuse_links, remove_file
from aotc.store.layout import oci
from aotc.store.layout.bundle import each_file
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.store import FOLDERS, Store
from aotc.store.layout.units import read_unit, units_folder
from aotc.store.maintenance.reach import Reach, subject_of
from aotc.store.maintenance.reports import Freed, Removal
from aotc.store.maintenance.retention import Policy, RetentionRoot, check_policy, shrink, tag_holders, why_expired
from aotc.store.maintenance.survey import StoreFile, survey

LOCK_TIMEOUT = 60.0
"""Seconds to wait for writers that are just naming blobs, and for fsck."""

_TICK = 2.0  # seconds; the coarsest clock of a usual file system
_WORK_FOLDER = re.compile(r"aotc-build-[a-z0-9_]{8}")
"""A build's folder for one unit, in the temporary folder."""


def collect(store: Store, policy: Policy, *, dry_run: bool = False, timeout: float = LOCK_TIMEOUT) -> Freed:
    """Free whatever the policy allows, the temporary folder's work folders of killed builds too; with `dry_run`, only
    report it, without a lock or a write.

    Raises StoreError: the policy contradicts itself, the lock is not free within `timeout` seconds (it says who may
    hold it), the file system has no locks or cannot be written, a folder of the store is a link. CorruptError,
    NotFoundError, SchemaVersionError where a tag that stays cannot be followed, since what it reaches is not known;
    nothing is removed then.
    """
    check_policy(policy)
    refuse_links(store.path, FOLDERS)
    work = Path(tempfile.gettempdir())
    if dry_run:
        return _plan(store, policy, time.time(), work, dry_run)[0]
    with store.alone(timeout):
        freed, entries = _plan(store, policy, _clock(store), work, dry_run)
        _sweep(store, freed, entries)
    return freed


def _clock(store: Store) -> float:
    """The current time of the clock that sets file times, which may be a file server's."""
    path = store.path / ".aotc" / "gc.lock"
    with typed_errors("write", path):
        os.utime(path)
        return path.stat().st_mtime


class _Marks(NamedTuple):
    """To remove: tags and units with the reason, attachments of removed bundles, blobs. To keep: `kept` bytes, and
    `spared` blobs that nothing names."""

    going: dict[RetentionRoot, str]
    orphans: list[Descriptor]
    garbage: list[StoreFile]
    spared: frozenset[str]
    kept: int


def _mark(store: Store, policy: Policy, found: Iterable[StoreFile], now: float, cutoff: float) -> _Marks:
    entries = store.entries()
    blobs = {one.digest: one for one in found if one.kind == "blob"}
    sizes = {digest: blob.size for digest, blob in blobs.items()}
    reach = Reach(store.blobs, entries)

    roots = [entry for entry in entries if not subject_of(entry)]
    tags = tag_holders(roots, {digest: blob.written for digest, blob in blobs.items()}, policy)
    units = dict(_units(store, found, cutoff))
    going = {holder: reason for holder in (*tags, *units) if (reason := why_expired(holder, policy, now))}
    held = {tag: _reached(reach, tag.entry) for tag in tags if tag.entry and tag not in going}
    held |= {unit: needed for unit, needed in units.items() if unit not in going}
    dropped, kept = shrink(held, sizes, policy.max_size)
    going |= dict.fromkeys(dropped, "over the size limit")

    live = frozenset[str]().union(*(held[holder] for holder in held if holder not in dropped))
    untagged = {one.entry.digest for one in going if one.entry}  # another process may have just read the tag
    young = {digest for digest, blob in blobs.items() if blob.written > cutoff or digest in untagged}
    spared = frozenset(young).union(reach.reached(_documents(store, reach, young), lambda error: None)) - live
    orphans = [one for one in entries if subject_of(one) and not {subject_of(one), one.digest} & (live | spared)]
    garbage = [blob for digest, blob in blobs.items() if digest not in live and digest not in spared]
    return _Marks(going, orphans, garbage, spared & blobs.keys(), kept)


def _plan(store: Store, policy: Policy, now: float, work: Path, dry_run: bool) -> tuple[Freed, list[Descriptor]]:
    """The marks, and those of them that are entries of `index.json`."""
    writers = [writer for writer in store.writers() if writer.alive]
    # Where the clock was set back since a writer began, all that there is is spared.
    cutoff = min([now - policy.grace, *(one.since - _TICK if one.since <= now else 0.0 for one in writers)])
    found = survey(store.path)
    marks = _mark(store, policy, found, now, cutoff)
    untagged = [(one, why) for one, why in marks.going.items() if one.entry]
    units = [(one, why) for one, why in marks.going.items() if not one.entry]
    removed = [Removal("tag", one.name, f"{why}; it named {one.entry.digest}") for one, why in untagged if one.entry]
    removed += [
        Removal("attachment", one.annotation(oci.REF_NAME), f"{subject_of(one)} is gone") for one in marks.orphans
    ]
    removed += [Removal("unit", one.name, why, one.size) for one, why in units]
    removed += [Removal("blob", blob.name, "nothing names it", blob.size) for blob in marks.garbage]
    removed += _leftovers(store, found, {one.name for one, _ in units}, bool(writers))
    removed += _logs(found, policy, now, cutoff)
    removed += _work_folders(work, cutoff)
    freed = Freed(
        folder=str(store.path),
        removed=tuple(removed),
        kept=marks.kept,
        waiting=sum(one.size for one in found if one.kind == "blob" and one.digest in marks.spared),
        over=0 if policy.max_size is None else max(0, marks.kept - policy.max_size),
        writers=tuple(writer.holder for writer in writers),
        dry_run=dry_run,
    )
    return freed, [*(one.entry for one, _ in untagged if one.entry), *marks.orphans]


def _units(store: Store, found: Iterable[StoreFile], cutoff: float) -> Iterator[tuple[RetentionRoot, frozenset[str]]]:
    """Every unit with the blobs that it names; none for a record that this aotc cannot use."""
    for one in found:
        if one.kind == "unit":
            unit = read_unit(store.path / one.name)
            needed = frozenset(file.blob for file in each_file(unit.artifact)) if unit else frozenset()
            yield RetentionRoot(one.name, one.written, one.written <= cutoff, one.size), needed


def _reached(reach: Reach, entry: Descriptor) -> frozenset[str]:
    def refuse(error: StoreError) -> None:
        error.hint = (
            f"what {entry.annotation(oci.REF_NAME)} reaches is not known, so nothing was removed: `aotc fsck` says "
            "what is wrong; build or pull it again, or let --untag remove it"
        )
        raise error

    return frozenset(reach.reached([entry], refuse))


def _documents(store: Store, reach: Reach, digests: Collection[str]) -> list[Descriptor]:
    """The blobs that are an index or a manifest, by their bytes; they may be unreferenced."""
    found = []
    for digest in sorted(digests):
        try:
            with open_regular(store.blobs.path(digest)) as stream:
                is_json = stream.read(1) == b"{"
            if is_json and reach.named_by(digest):
                found.append(Descriptor(media_type=oci.INDEX, digest=digest, size=0))
        except (AotcError, OSError):
            continue  # a record, or damaged: it keeps nothing
    return found


def _leftovers(store: Store, found: Iterable[StoreFile], going: Collection[str], is_written: bool) -> Iterator[Removal]:
    """Files of killed processes, and locks of units that are `going` or gone. A locked file is in use, and stays."""
    for one in found:
        if one.kind == "unit lock":  # a build locks its units, and none begins while gc runs
            unit = str(Path(one.name).with_suffix(".json"))
            is_left = not is_written and (unit in going or not (store.path / unit).exists())
        else:
            is_left = one.kind in ("temporary", "lease")
        if is_left and not is_held(store.path / one.name):
            kind = "temporary" if one.kind == "temporary" else "lock"
            yield Removal(kind, one.name, "what used it was killed or is gone", one.size)


def _logs(found: Iterable[StoreFile], policy: Policy, now: float, cutoff: float) -> Iterator[Removal]:
    for one in found if policy.older_than is not None else ():
        if one.kind == "log" and one.written < min(now - (policy.older_than or 0.0), cutoff):
            yield Removal("log", one.name, "not written for that long", one.size)


def _work_folders(parent: Path, cutoff: float) -> Iterator[Removal]:
    """This user's work folders that no build holds."""
    for path in files_in(parent):
        if _WORK_FOLDER.fullmatch(path.name) and (status := status_of(path)) is not None:
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if ours and status.st_mtime <= cutoff and not is_held(path):
                files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
                size = sum(inner.st_size for file in files if (inner := status_of(file)) is not None)
                yield Removal("work folder", str(path), "its build was killed", size)


def remove_work_folders() -> None:
    """Remove what this user's killed builds have left in the temporary folder; a build that runs holds its own."""
    for one in _work_folders(Path(tempfile.gettempdir()), time.time() - _TICK):
        shutil.rmtree(one.name, ignore_errors=True)


def _sweep(store: Store, freed: Freed, entries: Collection[Descriptor]) -> None:
    """`index.json`, then units, then blobs: a kill in between leaves no name of a removed blob."""
    if entries:
        store.remove_entries(entries)
    units = [one for one in freed.removed if one.kind == "unit"]
    for one in units:
        remove_file(store.path, store.path / one.name)
    if units:
        with typed_errors("write in", units_folder(store)):
            fsync_folder(units_folder(store))
    for one in freed.removed:
        if one.kind == "work folder":
            shutil.rmtree(one.name, ignore_errors=True)
        elif one.kind not in ("tag", "attachment", "unit"):
            remove_file(store.path, store.path / one.name)
