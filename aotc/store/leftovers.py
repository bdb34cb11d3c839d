"""What killed processes leave: temporaries, leases, holders' names, work folders. Whatever is locked is alive."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from aotc.store.disk import files_in, is_temporary_name, status_of
from aotc.store.layout import Store
from aotc.store.locks import is_held
from aotc.store.units import is_unit_lock, units_folder

WORK_FOLDER = re.compile(r"aotc-build-[a-z0-9_]{8}")
"""A build's folder for one unit, in the temporary folder."""
PRIVATE_FOLDER = re.compile(r"aotc-hot-[a-z0-9_]{8}")
"""A process's own hot copies, where the cache folder could not be used."""


def dead_temporaries(store: Store) -> list[Path]:
    """Files that writers left half-written."""
    own = store.path / ".aotc"
    folders = (store.path, store.blobs.folder / "sha256", own, units_folder(store))
    found = (path for folder in folders for path in files_in(folder) if is_temporary(path))
    return [path for path in found if not is_held(path)]


def is_temporary(path: Path) -> bool:
    """Whether a writer may have made it."""
    return is_temporary_name(path.name) and (path.is_symlink() or not path.is_dir())


def stale_holder(store: Store) -> Path | None:
    """The name that a killed process left beside the lock of `index.json`."""
    lock = store.path / ".aotc" / "index.lock"
    holder = lock.with_name("index.lock.holder")
    return holder if holder.exists() and not is_held(lock) else None


def unused_unit_locks(store: Store, going: Collection[Path]) -> Iterator[Path]:
    """Locks of units that are not there, or that are `going`. Only while no writer runs may they be removed."""
    for path in files_in(units_folder(store)):
        record = path.with_suffix(".json")
        if is_unit_lock(path) and (record in going or not record.exists()) and not is_held(path):
            yield path


def dead_folders(parent: Path, name: re.Pattern[str], before: float) -> Iterator[Path]:
    """This user's folders of that name which no process holds and which did not change since `before`."""
    for path in files_in(parent):
        if name.fullmatch(path.name) and (status := status_of(path)) is not None:
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if ours and status.st_mtime <= before and not is_held(path):
                yield path
