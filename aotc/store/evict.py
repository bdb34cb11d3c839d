"""Hot copies that go: the least recently used sets, never one that a running process holds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from aotc.store.disk import TEMPORARY_PREFIX, temporary_name, typed_errors
from aotc.store.freed import Freed, Removal, remove_file, remove_tree, size_of_tree
from aotc.store.locks import locked, try_folder_alone

VERSION = "hot-v1"
EVICT_LOCK = Path("locks") / "evict.lock"
"""Under `hot-v1`: shared by who makes hot copies, held alone by who takes them away."""
LOCK_TIMEOUT = 60.0  # seconds


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

    Raises StoreError: a process makes hot copies for longer than `timeout` seconds, or the folder cannot be written.
    """
    hot = root / VERSION
    if dry_run or not hot.is_dir():
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
        self.files = dict(self._each(folder / "files" / "sha256"))
        self.sets = [
            _Set(path, _time(path), frozenset(inode for _, inode in self._each(path)))
            for path in _finished(folder / "sets")
        ]

    def _each(self, folder: Path) -> Iterator[tuple[Path, Inode]]:
        for path in _finished(folder):
            status = path.lstat()
            self.sizes[status.st_dev, status.st_ino] = status.st_size
            yield path, (status.st_dev, status.st_ino)

    def size_of(self, inodes: Iterable[Inode]) -> int:
        return sum(self.sizes[inode] for inode in set(inodes))


def temporaries(hot: Path) -> list[Path]:
    """What is being made, or was when its maker was killed."""
    patterns = ("files/sha256/.tmp-*", "sets/.tmp-*", "sets/*/.tmp-*")
    return [path for pattern in patterns for path in sorted(hot.glob(pattern))]


def _finished(folder: Path) -> list[Path]:
    with typed_errors("look into", folder):
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if not path.name.startswith(TEMPORARY_PREFIX)]


def _time(path: Path) -> float:
    with typed_errors("look at", path):
        return path.lstat().st_mtime


def _evict(hot: _Hot, max_size: int | None, older_than: float | None, dry_run: bool) -> Freed:
    removed = list(_remove_temporaries(hot, dry_run))
    left = sorted(hot.sets, key=lambda one: (one.used, one.path.name))
    for one in list(left):
        reason = _why(one, hot.size_of(_inodes(left)), max_size, older_than)
        if reason and remove_set(one.path, dry_run):
            left.remove(one)
            name = str(one.path.relative_to(hot.folder))
            removed.append(Removal("hot copy", name, reason, hot.size_of(one.inodes - _inodes(left))))
    removed += _remove_unused_files(hot, left, dry_run)
    kept = hot.size_of(_inodes(left))
    over = max(0, kept - max_size) if max_size is not None else 0
    return Freed(folder=str(hot.folder), removed=tuple(removed), kept=kept, over=over, dry_run=dry_run)


def _why(one: _Set, total: int, max_size: int | None, older_than: float | None) -> str:
    if older_than is not None and one.used < time.time() - older_than:
        return "not used for that long"
    return "over the size limit" if max_size is not None and total > max_size else ""


def _inodes(sets: Iterable[_Set]) -> frozenset[Inode]:
    return frozenset[Inode]().union(*(one.inodes for one in sets))


def _remove_temporaries(hot: _Hot, dry_run: bool) -> Iterator[Removal]:
    """Nobody makes hot copies while we hold the lock, so whoever made these was killed. (A dry run cannot know.)"""
    for path in [] if dry_run else temporaries(hot.folder):
        is_folder = path.is_dir() and not path.is_symlink()
        size = size_of_tree(path) if is_folder else path.lstat().st_size
        remove_tree(path) if is_folder else remove_file(path)
        yield Removal("temporary", str(path.relative_to(hot.folder)), "its writer was killed", size)


def remove_set(path: Path, dry_run: bool = False) -> bool:
    """Take the set away at once; False where a running process holds it."""
    descriptor = try_folder_alone(path)
    if descriptor is None:
        return False
    try:
        if not dry_run:
            doomed = path.with_name(temporary_name())
            with typed_errors("remove", path):
                path.rename(doomed)
            remove_tree(doomed)
    finally:
        os.close(descriptor)
    return True


def _remove_unused_files(hot: _Hot, left: Iterable[_Set], dry_run: bool) -> Iterator[Removal]:
    """The files of which no set has a link any more, and their locks. Those of a set that went were counted with it."""
    used, counted = _inodes(left), _inodes(hot.sets)
    for path, inode in hot.files.items():
        if inode in used:
            continue
        if not dry_run:
            remove_file(path)
            remove_file(hot.folder / "locks" / f"{path.name}.lock")
        if inode not in counted:
            yield Removal("hot copy", str(path.relative_to(hot.folder)), "in no set", hot.sizes[inode])
