"""Hot copies that go: the least recently used sets, never one that a running process holds."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aotc.store.disk import (
    exists,
    files_in,
    is_temporary_name,
    open_folder,
    refuse_links,
    status_of,
    temporary_name,
    typed_errors,
)
from aotc.store.freed import Freed, Removal, remove_file, remove_tree, size_of_tree
from aotc.store.locks import close_lock, locked, try_folder_alone
from aotc.store.names import is_digest

VERSION = "hot-v1"
FOLDERS = tuple(
    f"{VERSION}{inner}"
    for inner in ("", "/files", "/files/sha256", "/sets", "/locks", "/downloads", "/downloads/sha256")
)
"""Every folder of the hot copies that something is removed from; no links, see `refuse_links`."""
EVICT_LOCK = Path("locks") / "evict.lock"
"""Under `hot-v1`: shared by who makes hot copies, held alone by who takes them away."""
LOCK_TIMEOUT = 60.0  # seconds
RESUMED_WITHIN = 3600.0
"""Seconds for which a download that broke is kept, for a later load to go on with."""


def evict(
    root: Path,
    *,
    max_size: int | None = None,
    older_than: float | None = None,
    dry_run: bool = False,
    timeout: float = LOCK_TIMEOUT,
) -> Freed:
    """Take away hot copies under the cache folder `root`, but no set that a running process holds.

    Those not handed out for `older_than` seconds; then, least recently used first, until at most `max_size` bytes are
    left; and what killed processes left half-made.

    Raises StoreError: a process makes hot copies for longer than `timeout` seconds, the folder cannot be written, or
    one in it is a link.
    """
    hot = root / VERSION
    refuse_links(root, FOLDERS)
    if dry_run or not exists(hot):
        return _evict(_Hot(hot), max_size, older_than, dry_run=True)
    with locked(hot / EVICT_LOCK, timeout):
        return _evict(_Hot(hot), max_size, older_than, dry_run=False)


Inode = tuple[int, int]


@dataclass(frozen=True)
class _Set:
    """A set: its files, and when it was last handed out."""

    path: Path
    used: float
    inodes: frozenset[Inode]


class _Hot:
    """What is in the folder. A file counts once, however many sets have a link to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[Inode, int] = {}
        self.files = {path: inode for path, inode in self._each(folder / "files" / "sha256") if _is_named(path)}
        self.sets = [
            _Set(path, status.st_mtime, frozenset(inode for _, inode in self._each(path)))
            for path in finished_in(folder / "sets")
            if _is_named(path) and (status := status_of(path)) is not None
        ]

    def _each(self, folder: Path) -> Iterator[tuple[Path, Inode]]:
        for path in finished_in(folder):
            if (status := status_of(path)) is not None:
                self.sizes[status.st_dev, status.st_ino] = status.st_size
                yield path, (status.st_dev, status.st_ino)


def _is_named(path: Path) -> bool:
    """As hot copies are: by a digest."""
    return is_digest(f"sha256:{path.name}")


class _Ledger:
    """How many sets have each file, and the bytes of all."""

    def __init__(self, hot: _Hot) -> None:
        self._sizes = hot.sizes
        self.counts = Counter(inode for one in hot.sets for inode in one.inodes)
        self.total = sum(self._sizes[inode] for inode in self.counts)

    def drop(self, one: _Set) -> int:
        """The bytes of the files that no other set has."""
        self.counts.subtract(one.inodes)
        freed = sum(self._sizes[inode] for inode in one.inodes if not self.counts[inode])
        self.total -= freed
        return freed


def temporaries(hot: Path) -> list[Path]:
    """What is being made, or was when its maker was killed; a download only once nobody goes on with it for an hour."""
    sets = [path for path in files_in(hot / "sets") if not path.is_symlink()]
    folders = (hot / "files" / "sha256", hot / "sets", *(path for path in sets if path.is_dir()))
    made = [path for folder in folders for path in files_in(folder) if is_temporary_name(path.name)]
    before = time.time() - RESUMED_WITHIN
    downloads = [
        path
        for path in files_in(hot / "downloads" / "sha256")
        if is_temporary_name(path.name) or is_digest(f"sha256:{path.name}")
    ]
    return [*made, *(p for p in downloads if (status := status_of(p)) is not None and status.st_mtime < before)]


def finished_in(folder: Path) -> list[Path]:
    """What a folder holds, without temporaries. Raises StoreError."""
    return [path for path in files_in(folder) if not is_temporary_name(path.name)]


def _evict(hot: _Hot, max_size: int | None, older_than: float | None, dry_run: bool) -> Freed:
    removed = list(_remove_temporaries(hot, dry_run))
    ledger = _Ledger(hot)
    for one in sorted(hot.sets, key=lambda one: (one.used, one.path.name)):
        reason = _why(one, ledger.total, max_size, older_than)
        if reason and remove_set(hot.folder, one.path, dry_run):
            removed.append(Removal("hot copy", str(one.path.relative_to(hot.folder)), reason, ledger.drop(one)))
    removed += _remove_unused_files(hot, ledger, dry_run)
    over = max(0, ledger.total - max_size) if max_size is not None else 0
    return Freed(folder=str(hot.folder), removed=tuple(removed), kept=ledger.total, over=over, dry_run=dry_run)


def _why(one: _Set, total: int, max_size: int | None, older_than: float | None) -> str:
    if older_than is not None and one.used < time.time() - older_than:
        return "not used for that long"
    return "over the size limit" if max_size is not None and total > max_size else ""


def _remove_temporaries(hot: _Hot, dry_run: bool) -> Iterator[Removal]:
    """Nobody makes hot copies while we hold the lock, so whoever made these was killed. (A dry run cannot know.)"""
    for path in [] if dry_run else temporaries(hot.folder):
        if (status := status_of(path)) is None:
            continue  # it went with its folder
        is_folder = stat.S_ISDIR(status.st_mode)
        size = size_of_tree(path) if is_folder else status.st_size
        (remove_tree if is_folder else remove_file)(hot.folder, path)
        yield Removal("temporary", str(path.relative_to(hot.folder)), "its writer was killed", size)


def remove_set(hot: Path, path: Path, dry_run: bool = False) -> bool:
    """Take the set away at once; False where a running process holds it."""
    descriptor = try_folder_alone(path)
    if descriptor is None:
        return False
    try:
        if not dry_run:
            doomed = path.with_name(temporary_name())
            with typed_errors("remove", path):
                folder = open_folder(hot, path.parent)
                try:
                    os.rename(path.name, doomed.name, src_dir_fd=folder, dst_dir_fd=folder)
                finally:
                    os.close(folder)
            remove_tree(hot, doomed)
    finally:
        close_lock(descriptor)
    return True


def _remove_unused_files(hot: _Hot, ledger: _Ledger, dry_run: bool) -> Iterator[Removal]:
    """The files of which no set has a link any more, and their locks. Those of a set that went were counted with it."""
    for path, inode in hot.files.items():
        if ledger.counts[inode]:
            continue
        if not dry_run:
            remove_file(hot.folder, path)
            remove_file(hot.folder, hot.folder / "locks" / f"{path.name}.lock")
        if inode not in ledger.counts:
            yield Removal("hot copy", str(path.relative_to(hot.folder)), "in no set", hot.sizes[inode])
