"""A bundle to cache folders, after all its checks."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

from aotc.digest import sha256_bytes
from aotc.errors import CorruptError, EnvironmentMismatchError, NotFoundError, StoreError
from aotc.store.files.disk import typed_errors
from aotc.store.files.writing import make_folder, temporary_name
from aotc.store.layout.bundle import Bundle
from aotc.store.layout.compiler_cache import CachedFile, CompilerCache, read_cache
from aotc.store.layout.store import Store
from aotc.store.readable import ReadableStore
from aotc.tools.caches.folders import with_paths
from aotc.tools.caches.origin import Origin, rules

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Restored(NamedTuple):
    """How many files were written, were there with these bytes, and were there with others, which stay."""

    written: int = 0
    equal: int = 0
    other: int = 0


def cache_of(store: ReadableStore, bundle: Bundle) -> CompilerCache:
    """The record of a bundle that is a compiler cache. Raises StoreError for another bundle, and as `read_cache`."""
    for entry in bundle.artifacts:
        if entry.is_cache:
            return read_cache(store, entry)
    raise StoreError(
        f"{bundle.model}@{bundle.digest} holds compiled models, and no compiler cache",
        hint="load it with aotc.load; `aotc cache save` makes caches",
    )


def restore(store: Store, bundle: Bundle, folders: Mapping[str, Path], here: Origin) -> dict[str, Restored]:
    """Write the files of a cache to the folder of its kind; those of other kinds than in `folders` are left out.

    Versions and the machine are compared, and every byte is checked, before the first file is written. A file that is
    there stays: a running process may have it open. The caller has checked the bundle's signatures.

    Raises EnvironmentMismatchError with every mismatch, NotFoundError, CorruptError, StoreError.
    """
    cache = cache_of(store, bundle)
    if issues := tuple(rule.issue for rule in rules(cache, here) if rule.issue is not None):
        raise EnvironmentMismatchError(
            f"the compiler cache {bundle.model}@{bundle.digest[:19]}… does not fit this process",
            issues=issues,
        )
    with typed_errors("write in", Path(tempfile.gettempdir())), tempfile.TemporaryFile() as pack:
        try:
            store.blobs.unpack(cache.pack, pack)
        except (CorruptError, NotFoundError) as error:
            error.hint = error.hint.replace("build or fetch the bundle", "save or fetch the cache")
            raise
        _check_files(cache, pack)
        pack.seek(0)
        done = {kind: Restored() for kind in folders}
        for file in cache.files:
            data = pack.read(file.size)
            if file.kind in folders:
                counts = done[file.kind]._asdict()
                counts[_write(folders[file.kind], file, data)] += 1
                done[file.kind] = Restored(**counts)
    return done


def _check_files(cache: CompilerCache, pack: IO[bytes]) -> None:
    pack.seek(0)
    for file in cache.files:
        if (actual := sha256_bytes(pack.read(file.size))) != file.digest:
            raise CorruptError(
                f"the file {file.path} of the compiler cache has the digest {actual}; its record says {file.digest}",
                hint="it was not written by `aotc cache save`, or was changed: do not trust where it came from",
                expected=file.digest,
                actual=actual,
            )


def _write(root: Path, file: CachedFile, data: bytes) -> str:
    """Which of the counts of `Restored` the file adds to."""
    path = root / file.path
    data = with_paths(path.name, data, path.parent)
    make_folder(root)
    with typed_errors("write", path):
        folder = _open_folder(root, file.path.split("/")[:-1])
        try:
            there = _there(path.name, folder)
            if there is not None:
                return "equal" if there == data else "other"
            temporary = temporary_name()
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as stream:
                    stream.write(data)
                if file.modified:
                    os.utime(temporary, ns=(file.modified, file.modified), dir_fd=folder)
                os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
        finally:
            os.close(folder)
    return "written"


def _open_folder(root: Path, parts: list[str]) -> int:
    """A descriptor of a folder in `root`, made where it is missing. `root` may be a link; within it, none is followed.

    Raises OSError, and StoreError for a folder of another user: who owns a cache can change what this user runs.
    """
    descriptor, path = os.open(root, _FOLDER), root
    try:
        _check_owner(descriptor, path)
        for part in parts:
            path /= part
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=descriptor)
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
            _check_owner(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_owner(descriptor: int, path: Path) -> None:
    owner = os.fstat(descriptor).st_uid
    if owner not in (0, os.geteuid()):
        raise StoreError(
            f"{path} belongs to the user {owner}, this process runs as {os.geteuid()}: that user could change the code",
            hint="name a folder of your own, and set the compiler's variable to it: --cache inductor=FOLDER",
            path=str(path),
        )


def _there(name: str, folder: int) -> bytes | None:
    """The bytes of a file that exists. Raises OSError for a link."""
    try:
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder), "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return None
