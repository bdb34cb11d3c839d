"""One set of hot copies: checked each time it is handed out, made where there is none, repaired where damaged."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from aotc.digest import sha256_json, sha256_stream
from aotc.errors import CorruptError
from aotc.records import File
from aotc.store.disk import TEMPORARY_PREFIX, draft, make_folder, temporary_name, typed_errors
from aotc.store.evict import EVICT_LOCK, VERSION
from aotc.store.freed import remove_file, remove_tree
from aotc.store.locks import close_lock, hold_folder, locked, still_names
from aotc.store.names import check_file_name, hex_of

_log = logging.getLogger("aotc")

FOLDER_TIMEOUT = 10.0
"""Seconds to wait for a set's folder: who takes it away holds it for an instant, unless that process is stuck."""

EVICTION_TIMEOUT = 60.0
"""Seconds to wait for an eviction to end: it looks at what is there and removes some, unless that process is stuck."""

_UNWRITABLE = 0o444
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_LINK = {errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP}


class Source(Protocol):
    """Where files are decompressed from: `Blobs`, or something that fetches. Several threads call it at once."""

    def extract(self, file: File, destination: Path) -> None: ...


class Stamp(NamedTuple):
    """Which file it is, and when its bytes were changed last."""

    device: int
    inode: int
    size: int
    changed_ns: int


def set_key(files: Sequence[File]) -> str:
    """The digest that a set of files is named by: over the sorted list of [name, digest of the file's bytes]."""
    return sha256_json(sorted({(file.name, file.digest) for file in files}))


def check_names(files: Sequence[File]) -> None:
    """Raises CorruptError where the files cannot stand side by side in one folder."""
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


def materialise_set(
    root: Path, files: Sequence[File], blobs: Source, lock_timeout: float, held: dict[Path, int]
) -> tuple[Path, Mapping[Path, Stamp], bool]:
    """The set, which is then in `held`; the stamp that each file had at its check; whether anything was written."""
    hot = root / VERSION
    folder = hot / "sets" / hex_of(set_key(files))
    checked: set[Stamp] = set()
    for attempt in range(4):  # a second time after repairing it or losing a race; more are for luck
        is_held = _hold(folder, held, min(lock_timeout, FOLDER_TIMEOUT))
        stamps, damaged = _examine(folder, files, checked)
        if is_held and not damaged:
            _check_mappable(folder)
            _remove_strangers(folder, files)
            _mark_used(folder)
            return folder, stamps, attempt > 0
        make_folder(hot)
        _check_mappable(hot)
        with locked(hot / EVICT_LOCK, min(lock_timeout, EVICTION_TIMEOUT), shared=True):
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


def _hold(folder: Path, held: dict[Path, int], timeout: float) -> bool:
    """Keep eviction away from the set; False if it is not there. One held already may have been taken away by hand.

    Raises StoreError, also after `timeout` seconds.
    """
    if (old := held.get(folder)) is not None:
        if still_names(folder, old):
            return True
        close_lock(held.pop(folder))
    with typed_errors("lock", folder):
        try:
            descriptor = hold_folder(folder, timeout, shared=True)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return True  # where nobody can lock, nobody can evict
    if descriptor is not None:
        held[folder] = descriptor
    return descriptor is not None


def release_all(held: dict[Path, int]) -> None:
    """Let go of every set in `held`, so that it may be evicted."""
    while held:
        close_lock(held.popitem()[1])


def _mark_used(folder: Path) -> None:
    """The set's time says when it was last handed out. A read-only cache is not evicted from."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def _examine(folder: Path, files: Sequence[File], checked: Collection[Stamp]) -> tuple[dict[Path, Stamp], list[File]]:
    """The stamps of the files of a set whose bytes are the record's, and the files that are not so."""
    if not _is_folder(folder):
        return {}, list(files)
    found = {file: _stamp_if_intact(folder / file.name, file, checked) for file in files}
    stamps = {folder / file.name: stamp for file, stamp in found.items() if stamp is not None}
    return stamps, [file for file, stamp in found.items() if stamp is None]


def _stamp_if_intact(path: Path, file: File, checked: Collection[Stamp] = ()) -> Stamp | None:
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


def stamp_of(path: Path) -> Stamp | None:
    """The stamp of what stands at `path` now; None where nothing does."""
    try:
        return _stamp(path.lstat())
    except OSError:
        return None


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _remove_strangers(folder: Path, files: Sequence[File]) -> None:
    """Take away what is no file of the set: the loader would find a `.json` beside a library, and read it."""
    names = {file.name for file in files}
    with typed_errors("look into", folder):
        strangers = [path for path in folder.iterdir() if path.name not in names]
    for path in strangers:
        if path.name.startswith(TEMPORARY_PREFIX):
            continue  # of a process that repairs the set, or was killed while it did
        (remove_tree if _is_folder(path) else remove_file)(folder.parent, path)


def _materialise_file(hot: Path, file: File, blobs: Source, lock_timeout: float) -> tuple[Path, Stamp]:
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


def _make_set(folder: Path, sources: Mapping[str, tuple[Path, Stamp]]) -> None:
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


def _repair_set(folder: Path, sources: Mapping[str, tuple[Path, Stamp]]) -> None:
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
