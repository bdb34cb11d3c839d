"""`aotc gc --cache`: the hot copies of this host, those that killed processes kept for themselves included."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from aotc.store.evict import LOCK_TIMEOUT, evict
from aotc.store.freed import Freed, Removal, remove_tree, size_of_tree
from aotc.store.leftovers import PRIVATE_FOLDER, dead_folders
from aotc.store.private_folders import private_parents
from aotc.store.retention import GRACE


def collect_hot(
    root: Path,
    *,
    max_size: int | None = None,
    older_than: float | None = None,
    grace: float = GRACE,
    dry_run: bool = False,
    timeout: float = LOCK_TIMEOUT,
) -> Freed:
    """Evict from the cache folder `root` as `evict` does, and remove private folders that no process holds any more.

    Ages in seconds; a private folder that changed within `grace` stays. Raises StoreError.
    """
    freed = evict(root, max_size=max_size, older_than=older_than, dry_run=dry_run, timeout=timeout)
    removed = list(freed.removed)
    for parent in private_parents():
        for path in dead_folders(parent, PRIVATE_FOLDER, time.time() - grace):
            removed.append(Removal("work folder", str(path), "its process was killed", size_of_tree(path)))
            if not dry_run:
                remove_tree(path)
    return msgspec.structs.replace(freed, removed=tuple(removed))
