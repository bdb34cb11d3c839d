"""Hot copies: the decompressed files of this host, the ones that are mapped."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from aotc.digest import sha256_json, sha256_stream
from aotc.errors import CorruptError, Issue, StoreError
from aotc.records import File
from aotc.store.amounts import parse_size
from aotc.store.disk import TEMPORARY_PREFIX, draft, make_folder, temporary_name, typed_errors
from aotc.store.evict import EVICT_LOCK, VERSION, evict
from aotc.store.locks import held_folder, hold_folder, locked, still_names
from aotc.store.names import check_file_name, hex_of

LOCK_TIMEOUT = 600.0  # seconds; the lock is held while one file is decompressed

_log = logging.getLogger("aotc")

_UNWRITABLE = 0o444
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_LINK = {errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP}


class Source(Protocol):
    """Where files are decompressed from: `Blobs`, or something that fetches. Several threads call it at once."""

    def extract(self, file: File, destination: Path) -> None: ...


class _Stamp(NamedTuple):
    """Which file it is, and when its bytes were changed last."""

    device: int
    inode: int
    size: int
    changed_ns: int


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


def set_key(files: Sequence[File]) -> str:
    """The digest that a set of files is named by: over the sorted list of [name, digest of the file's bytes]."""
    return sha256_json(sorted({(file.name, file.digest) for file in files}))


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

    Where the folder cannot be used (read-only, full, no home, mounted noexec), a private one that is removed at exit
    takes its place, with a warning on the logger `aotc`.
    """

    def __init__(
        self, folder: Path | None = None, *, lock_timeout: float = LOCK_TIMEOUT, limit: int | None = None
    ) -> None:
        self.folder = folder
        self.lock_timeout = lock_timeout
        self.limit = limit
        self._private: Path | None = None
        self._falling_back = threading.Lock()
        self._stamps: dict[Path, _Stamp] = {}
        self._held: dict[Path, int] = {}
        weakref.finalize(self, _close_all, self._held)

    def close(self) -> None:
        """Let go of every set that was handed out: from now on it may be evicted."""
        _close_all(self._held)

    def materialise(self, files: Sequence[File], blobs: Source) -> Path:
        """A folder that holds `files` under their names and nothing else, each checked against its size and digest.

        However many processes start together, one decompresses each blob. A corrupt hot copy is replaced from `blobs`,
        and one that can be written is made unwritable before it is checked.

        Raises CorruptError (also for names that are no single path component), NotFoundError for a missing blob,
        StoreError where no folder can be written, another process holds a lock for too long, or the limit is no size.
        """
        _check_names(files)
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
            if _stamp_of(path) != stamp:
                raise CorruptError(
                    f"{path} was changed between its check and its use",
                    hint="something else writes to the hot copies: let AOTC_CACHE_DIR be a folder that only aotc "
                    "writes to, and start this process again",
                    path=str(path),
                    expected=str(stamp),
                    actual=str(_stamp_of(path)),
                )

    def _materialise_in(self, root: Path, files: Sequence[File], blobs: Source, limit: int | None = None) -> Path:
        folder, stamps, added = _materialise(root, files, blobs, self.lock_timeout, self._held)
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
        private = _make_private(parent)
        try:
            return private, self._materialise_in(private, files, blobs)
        except BaseException:
            shutil.rmtree(private, ignore_errors=True)
            raise


def _is_about(error: StoreError, folder: Path) -> bool:
    """Whether the system refused something in `folder`, so that another folder may do."""
    path = error.fields.get("path")
    return error.fields.get("errno") is not None and path is not None and Path(path).is_relative_to(folder)


def _check_names(files: Sequence[File]) -> None:
    if not files:
        raise CorruptError("a set of no files is not made: a variant has a library", expected="a file", actual="none")
    digests: dict[str, str] = {}
    for file in files:
        check_file_name(file.name)
        hex_of(file.digest)
        if digests.setdefault(file.name, file.digest) != file.digest:
            raise CorruptError(
                f"two files of one set are called {file.name}", expected=digests[file.name], actual=file.digest
            )


# -- one folder -------------------------------------------------------------------------------------------------------


def _materialise(
    root: Path, files: Sequence[File], blobs: Source, lock_timeout: float, held: dict[Path, int]
) -> tuple[Path, Mapping[Path, _Stamp], bool]:
    """The set, which is then in `held`; the stamp that each file had at its check; whether anything was written."""
    hot = root / VERSION
    folder = hot / "sets" / hex_of(set_key(files))
    checked: set[_Stamp] = set()
    for attempt in range(4):  # a second time after repairing it or losing a race; more are for luck
        is_held = _hold(folder, held)
        stamps, damaged = _examine(folder, files, checked)
        if is_held and not damaged:
            _check_mappable(folder)
            _remove_strangers(folder, files)
            _mark_used(folder)
            return folder, stamps, attempt > 0
        make_folder(hot)
        _check_mappable(hot)
        with locked(hot / EVICT_LOCK, lock_timeout, shared=True):
            sources = {file.name: _materialise_file(hot, file, blobs, lock_timeout) for file in damaged or files}
            if _is_folder(folder):
                _repair_set(folder, sources)
            else:
                _make_set(folder, sources)
        # The source of a link was checked just now, so the same file under its new name is not read again.
        checked = {stamp for _, stamp in sources.values()}
    raise CorruptError(
        f"{folder} changes while it is checked: {', '.join(file.name for file in damaged)}",
        hint="the disk is failing, or something else writes there: set AOTC_CACHE_DIR to another folder",
        path=str(folder),
        expected=files[0].digest,
        actual="other bytes",
    )


def _hold(folder: Path, held: dict[Path, int]) -> bool:
    """Keep eviction away from the set; False if it is not there. One held already may have been taken away by hand."""
    if (old := held.get(folder)) is not None:
        if still_names(folder, old):
            return True
        os.close(held.pop(folder))
    with typed_errors("lock", folder):
        try:
            descriptor = hold_folder(folder, shared=True)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return True  # where nobody can lock, nobody can evict
    if descriptor is not None:
        held[folder] = descriptor
    return descriptor is not None


def _close_all(held: dict[Path, int]) -> None:
    while held:
        os.close(held.popitem()[1])


def _mark_used(folder: Path) -> None:
    """The set's time says when it was last handed out. A read-only cache is not evicted from."""
    with contextlib.suppress(OSError):
        os.utime(folder)


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


def _examine(folder: Path, files: Sequence[File], checked: Collection[_Stamp]) -> tuple[dict[Path, _Stamp], list[File]]:
    """The stamps of the files of a set whose bytes are the record's, and the files that are not so."""
    if not _is_folder(folder):
        return {}, list(files)
    found = {file: _stamp_if_intact(folder / file.name, file, checked) for file in files}
    stamps = {folder / file.name: stamp for file, stamp in found.items() if stamp is not None}
    return stamps, [file for file, stamp in found.items() if stamp is None]


def _stamp_if_intact(path: Path, file: File, checked: Collection[_Stamp] = ()) -> _Stamp | None:
    """The stamp of the file at `path` if its bytes are the record's, which are not read where it is one of `checked`.

    What cannot be read is not intact: it is made anew. What can be written is made unwritable before it is read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
                return None
            stamp = _stamp(status)
            if stamp in checked:
                return stamp
            if status.st_mode & 0o222:
                _make_unwritable(descriptor)
            return stamp if sha256_stream(stream) == file.digest else None
    except OSError:
        return None


def _make_unwritable(descriptor: int) -> None:
    try:
        os.fchmod(descriptor, _UNWRITABLE)
    except OSError as error:
        if error.errno != errno.EROFS:  # nobody writes to a read-only file system
            raise


def _stamp_of(path: Path) -> _Stamp | None:
    try:
        return _stamp(path.lstat())
    except OSError:
        return None


def _stamp(status: os.stat_result) -> _Stamp:
    return _Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _remove_strangers(folder: Path, files: Sequence[File]) -> None:
    """Take away what is no file of the set: the loader would find a `.json` beside a library, and read it."""
    names = {file.name for file in files}
    with typed_errors("look into", folder):
        strangers = [path for path in folder.iterdir() if path.name not in names]
    for path in strangers:
        if path.name.startswith(TEMPORARY_PREFIX):
            continue  # of a process that repairs the set, or was killed while it did
        with typed_errors("remove", path):
            if _is_folder(path):
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _materialise_file(hot: Path, file: File, blobs: Source, lock_timeout: float) -> tuple[Path, _Stamp]:
    name = hex_of(file.digest)
    path = hot / "files" / "sha256" / name
    if stamp := _stamp_if_intact(path, file):
        return path, stamp
    with locked(hot / "locks" / f"{name}.lock", lock_timeout):
        if stamp := _stamp_if_intact(path, file):  # another process made it while we waited
            return path, stamp
        blobs.extract(file, path)
        _log.debug("decompressed %s to %s", file.blob, path)
        with typed_errors("look at", path):
            return path, _stamp(path.lstat())


def _make_set(folder: Path, sources: Mapping[str, tuple[Path, _Stamp]]) -> None:
    """Make the folder at once, unless another process made it first."""
    temporary = folder.with_name(temporary_name())
    make_folder(temporary)
    try:
        for name, (source, _) in sources.items():
            _link(source, temporary / name)
        with typed_errors("write", folder):
            if folder.is_symlink() or folder.is_file():
                folder.unlink(missing_ok=True)
            _rename_unless_there(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _rename_unless_there(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _repair_set(folder: Path, sources: Mapping[str, tuple[Path, _Stamp]]) -> None:
    """Replace file by file: others may be reading the folder, and what they have mapped stays mapped."""
    for name, (source, _) in sources.items():
        temporary = folder / temporary_name()
        try:
            _link(source, temporary)
            with typed_errors("write", folder / name):
                temporary.replace(folder / name)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()  # renaming one link of a file over another leaves both


def _link(source: Path, destination: Path) -> None:
    with typed_errors("write", destination):
        try:
            os.link(source, destination)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            _copy(source, destination)


def _copy(source: Path, destination: Path) -> None:
    with source.open("rb") as stream, draft(destination.parent, mode=_UNWRITABLE) as temporary:
        shutil.copyfileobj(stream, temporary.stream, 1 << 20)
        temporary.keep_as(destination)


def _check_mappable(folder: Path) -> None:
    """Code cannot be mapped from a file system mounted noexec, as containers mount /dev/shm."""
    with typed_errors("map code from", folder):
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise PermissionError(errno.EACCES, "the file system is mounted noexec")


# -- private folders --------------------------------------------------------------------------------------------------


def private_parents() -> Iterator[Path]:
    yield Path("/dev/shm")
    with contextlib.suppress(OSError):  # where no temporary folder can be written
        yield Path(tempfile.gettempdir())


def _make_private(parent: Path) -> Path:
    with typed_errors("write in", parent):
        private, _ = held_folder("aotc-hot-", parent)  # until this process ends: the lock says that it is in use
    atexit.register(_remove_in(os.getpid()), private)
    return private


def _remove_in(pid: int) -> Callable[[Path], None]:
    def remove(private: Path) -> None:
        if os.getpid() == pid:  # a forked child must not take away what its parent has mapped
            shutil.rmtree(private, ignore_errors=True)

    return remove
