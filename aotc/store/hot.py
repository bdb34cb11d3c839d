"""Hot copies: the decompressed files of this host, the ones that are mapped."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aotc.errors import CorruptError, Issue, StoreError
from aotc.records import File
from aotc.store.amounts import parse_size
from aotc.store.evict import EVICT_LOCK, VERSION, evict
from aotc.store.hot_sets import Source, Stamp, check_names, materialise_set, release_all, stamp_of
from aotc.store.private_folders import make_private_folder, private_parents

LOCK_TIMEOUT = 600.0  # seconds; the lock is held while one file is decompressed

_log = logging.getLogger("aotc")


def default_hot_folder() -> Path:
    """`$AOTC_CACHE_DIR`, else `$XDG_CACHE_HOME/aotc`, else `~/.cache/aotc`. Raises StoreError without a home."""
    if chosen := os.environ.get("AOTC_CACHE_DIR"):
        return Path(chosen).absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # a relative one is to be ignored, says the XDG base directory specification
        return xdg / "aotc"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise StoreError(f"this user has no home folder: {error}", hint="set AOTC_CACHE_DIR") from error
    return home / ".cache" / "aotc"


class HotCopies:
    """The decompressed files under a cache folder, each made once per host and checked each time it is handed out.

    folder/                         AOTC_CACHE_DIR
    └── hot-v1/
        ├── files/sha256/<hex>      the bytes of that digest, read-only (0444); shared, as CUDA variants share kernels
        ├── sets/<hex>/             one for each list of (name, digest), named by `set_key`
        │   └── <name>              a hard link to files/; a copy where there are no hard links
        └── locks/
            ├── <hex>.lock          held while files/sha256/<hex> is made
            └── evict.lock          shared while anything is made, held alone while something is taken away

    A set that was handed out is held (a shared lock on its folder) until `close`, or until this object goes: it is not
    evicted meanwhile. With a limit (`limit`, else `$AOTC_CACHE_LIMIT`, in bytes or like `20GiB`), the sets that nobody
    holds go, least recently used first, whenever something was added.

    Where the folder cannot be used (read-only, full, no home, mounted noexec, a set's folder or evict.lock held by a
    process that is stuck), a private one that is removed at exit takes its place, with a warning on the logger `aotc`.
    """

    def __init__(
        self, folder: Path | None = None, *, lock_timeout: float = LOCK_TIMEOUT, limit: int | None = None
    ) -> None:
        self.folder = folder
        self.lock_timeout = lock_timeout
        self.limit = limit
        self._private: Path | None = None
        self._falling_back = threading.Lock()
        self._stamps: dict[Path, Stamp] = {}
        self._held: dict[Path, int] = {}
        weakref.finalize(self, release_all, self._held)

    def close(self) -> None:
        """Let go of every set that was handed out: from now on it may be evicted."""
        release_all(self._held)

    def materialise(self, files: Sequence[File], blobs: Source) -> Path:
        """A folder that holds `files` under their names and nothing else, each checked against its size and digest.

        However many processes start together, one decompresses each blob. A corrupt hot copy is replaced from `blobs`,
        and one that can be written is made unwritable before it is checked.

        Raises CorruptError (also for names that are no single path component), NotFoundError for a missing blob,
        StoreError where no folder can be written, another process holds a lock for too long, or the limit is no size.
        """
        check_names(files)
        limit = _limit() if self.limit is None else self.limit
        if self._private is not None:
            return self._materialise_in(self._private, files, blobs)
        try:
            root = default_hot_folder() if self.folder is None else self.folder.absolute()
        except StoreError as error:
            return self._fall_back(files, blobs, "the cache folder", error)
        try:
            return self._materialise_in(root, files, blobs, limit)
        except StoreError as error:
            if not _is_about(error, root / VERSION):
                raise
            return self._fall_back(files, blobs, str(root), error)

    def materialise_all(self, sets: Sequence[Sequence[File]], blobs: Source) -> list[Path]:
        """`materialise` for several sets, side by side on this process's CPUs. Raises as it does, the first error."""
        workers = min(len(sets), len(os.sched_getaffinity(0)))
        if workers < 2:
            return [self.materialise(files, blobs) for files in sets]
        with ThreadPoolExecutor(workers) as pool:
            working = [pool.submit(self.materialise, files, blobs) for files in sets]
            try:
                return [one.result() for one in working]
            finally:
                pool.shutdown(cancel_futures=True)

    def confirm(self) -> None:
        """Raises CorruptError where a file that was handed out is another one now, or was written to since its check.

        To be called when the files were mapped: a path is opened once to check and once more to map.
        """
        for path, stamp in self._stamps.items():
            if stamp_of(path) != stamp:
                raise CorruptError(
                    f"{path} was changed between its check and its use",
                    hint="something else writes to the hot copies: let AOTC_CACHE_DIR be a folder that only aotc "
                    "writes to, and start this process again",
                    path=str(path),
                    expected=str(stamp),
                    actual=str(stamp_of(path)),
                )

    def _materialise_in(self, root: Path, files: Sequence[File], blobs: Source, limit: int | None = None) -> Path:
        folder, stamps, added = materialise_set(root, files, blobs, self.lock_timeout, self._held)
        self._stamps.update(stamps)
        if added and limit is not None:
            _evict(root, limit)
        return folder

    def _fall_back(self, files: Sequence[File], blobs: Source, wanted: str, reason: StoreError) -> Path:
        with self._falling_back:  # the first thread that needs it makes the private folder
            if self._private is None:
                return self._make_private_set(files, blobs, wanted, reason)
        return self._materialise_in(self._private, files, blobs)

    def _make_private_set(self, files: Sequence[File], blobs: Source, wanted: str, reason: StoreError) -> Path:
        issues = [Issue(message=reason.message, where=wanted, hint=reason.hint)]
        for parent in private_parents():
            try:
                private, folder = self._materialise_privately(parent, files, blobs)
            except StoreError as error:
                if not _is_about(error, parent):
                    raise
                issues.append(Issue(message=error.message, where=str(parent), hint=error.hint))
                continue
            _log.warning(
                "hot copies go to %s, private to this process, instead of %s: %s; set AOTC_CACHE_DIR to a folder that "
                "can be written",
                private,
                wanted,
                reason.message,
            )
            self._private = private
            return folder
        raise StoreError(
            "no folder can hold the hot copies",
            hint="set AOTC_CACHE_DIR to a folder with free space that can be written and is not mounted noexec",
            issues=tuple(issues),
        ) from reason

    def _materialise_privately(self, parent: Path, files: Sequence[File], blobs: Source) -> tuple[Path, Path]:
        """A new private folder in `parent`, and the set in it. A failure leaves nothing: it may be memory."""
        private = make_private_folder(parent)
        try:
            return private, self._materialise_in(private, files, blobs)
        except BaseException:
            shutil.rmtree(private, ignore_errors=True)
            raise


def _is_about(error: StoreError, folder: Path) -> bool:
    """Whether the system refused something in `folder`, or an eviction there has no end, so that another may do."""
    path = Path(error.fields.get("path") or "/")
    return path == folder / EVICT_LOCK or (error.fields.get("errno") is not None and path.is_relative_to(folder))


def _limit() -> int | None:
    chosen = os.environ.get("AOTC_CACHE_LIMIT")
    try:
        return parse_size(chosen) if chosen else None
    except StoreError as error:
        raise StoreError(f"AOTC_CACHE_LIMIT: {error.message}", hint=error.hint) from error


def _evict(root: Path, limit: int) -> None:
    """Bring the cache below its limit, if nobody else is at it: who adds something next will be."""
    try:
        freed = evict(root, max_size=limit, timeout=0.0)
    except StoreError as error:
        busy = error.fields.get("errno") is None
        _log.log(logging.DEBUG if busy else logging.WARNING, "no hot copies were evicted: %s", error.message)
        return
    if freed.over:
        _log.warning(
            "the hot copies in %s take %d bytes, %d over the limit: running processes hold them",
            root,
            freed.kept,
            freed.over,
        )
