"""`aotc gc --cache`: the hot copies of this host, those that killed processes kept for themselves included, and what
the cache folder holds of remotes. What was accepted of signatures (`trust-v1`) stays: it is small, and no cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aotc.store.disk import files_in, is_temporary_name, refuse_links, status_of
from aotc.store.evict import LOCK_TIMEOUT, evict
from aotc.store.freed import Freed, Removal, remove_file, remove_tree, size_of_tree
from aotc.store.gc import collect
from aotc.store.layout import Store
from aotc.store.leftovers import PRIVATE_FOLDER, dead_folders
from aotc.store.locks import is_held
from aotc.store.names import is_digest
from aotc.store.private_folders import private_parents
from aotc.store.remote_store import VERSION as DOCUMENTS
from aotc.store.retention import GRACE, Policy
from aotc.store.staging import VERSION as STAGING


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

    With `older_than`, documents of remotes, and what builds for a URL have put together, go too where they were not
    used for so long. Ages in seconds; a private folder that changed within `grace` stays. Raises StoreError.
    """
    freed = evict(root, max_size=max_size, older_than=older_than, dry_run=dry_run, timeout=timeout)
    removed = list(freed.removed)
    for parent in private_parents():
        for path in dead_folders(parent, PRIVATE_FOLDER, time.time() - grace):
            removed.append(Removal("work folder", str(path), "its process was killed", size_of_tree(path)))
            if not dry_run:
                remove_tree(parent, path)
    if older_than is not None:
        refuse_links(root, (DOCUMENTS, f"{DOCUMENTS}/sha256", STAGING))
        removed += _collect_documents(root / DOCUMENTS, time.time() - older_than, dry_run)
        for path in files_in(root / STAGING):
            refuse_links(root / STAGING, [path.name])
            policy = Policy(older_than=older_than, untag=True, keep_last=0, grace=grace)
            staged = collect(Store.open(path), policy, dry_run=dry_run, timeout=timeout, work=path)
            removed += [
                msgspec.structs.replace(one, name=f"{STAGING}/{path.name}/{one.name}") for one in staged.removed
            ]
    return msgspec.structs.replace(freed, removed=tuple(removed))


def _collect_documents(folder: Path, before: float, dry_run: bool) -> Iterator[Removal]:
    """Whoever reads one that has gone fetches it again."""
    for path in files_in(folder / "sha256"):
        if not (is_digest(f"sha256:{path.name}") or is_temporary_name(path.name)):
            continue
        status = status_of(path)
        if status is not None and status.st_mtime < before and not is_held(path):
            if not dry_run:
                remove_file(folder.parent, path)
            name = str(path.relative_to(folder.parent))
            yield Removal("document", name, "not used for that long", status.st_size)
