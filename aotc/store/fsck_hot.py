"""`aotc fsck --cache`: the hot copies of this host. A set is named by the digest of what it holds: it checks itself."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from aotc.digest import sha256_file, sha256_json
from aotc.errors import StoreError
from aotc.store.disk import exists, files_in, refuse_links, status_of, typed_errors
from aotc.store.evict import EVICT_LOCK, FOLDERS, LOCK_TIMEOUT, VERSION, finished_in, remove_set, temporaries
from aotc.store.findings import Finding, FsckReport, Repair
from aotc.store.freed import remove_file, remove_tree
from aotc.store.locks import locked
from aotc.store.names import is_digest


def fsck_hot(root: Path, *, repair: bool = False, timeout: float = LOCK_TIMEOUT) -> FsckReport:
    """Check the hot copies under the cache folder `root`. Services may start meanwhile.

    With `repair`, what is damaged or left half-made is removed, to be made anew when it is next loaded; but no set that
    a running process holds, which the next load mends.

    Raises StoreError where the folder cannot be read or, for a repair, not be locked within `timeout` seconds, or where
    a folder in it is a link.
    """
    hot = root / VERSION
    if not exists(hot):
        return FsckReport(str(hot), ())
    if not repair:
        return _report(hot, (*_left_half_made(hot), *_check(hot)))
    refuse_links(root, FOLDERS)
    with locked(hot / EVICT_LOCK, timeout):
        found = [*_temporaries(hot), *_check(hot)]
        repairs = tuple(Repair(one.path, f"removed: {one.message}") for one in found if _remove(hot, one))
        return _report(hot, (*_temporaries(hot), *_check(hot)), repairs)


def _report(hot: Path, findings: tuple[Finding, ...], repairs: tuple[Repair, ...] = ()) -> FsckReport:
    sizes = [status.st_size for path in files_in(hot / "files" / "sha256") if (status := status_of(path)) is not None]
    return FsckReport(str(hot), findings, repairs, len(sizes), sum(sizes))


def _remove(hot: Path, finding: Finding) -> bool:
    path = hot / finding.path
    if finding.kind == "foreign file":
        return False
    if path.parent == hot / "sets" and finding.kind == "hot copy":
        return remove_set(hot, path)
    if path.is_dir() and not path.is_symlink():
        remove_tree(hot, path)
    else:
        remove_file(hot, path)
    return True


def _left_half_made(hot: Path) -> list[Finding]:
    """Temporaries, if nobody is making hot copies just now."""
    try:
        with locked(hot / EVICT_LOCK, 0.0):
            return _temporaries(hot)
    except StoreError:
        return []


def _temporaries(hot: Path) -> list[Finding]:
    message, hint = "its writer was killed", "`aotc gc --cache` removes it"
    names = [str(path.relative_to(hot)) for path in temporaries(hot)]
    return [Finding("temporary", "garbage", name, message, hint=hint) for name in names]


def _check(hot: Path) -> Iterator[Finding]:
    in_sets: set[int] = set()
    for path in finished_in(hot / "sets"):
        in_sets |= {status.st_ino for file in files_in(path) if (status := status_of(file)) is not None}
        yield from _check_set(hot, path)
    for path in finished_in(hot / "files" / "sha256"):
        yield from _check_file(hot, path, in_sets)
    for path in files_in(hot):
        if path.name not in ("files", "sets", "locks", "downloads"):
            yield _foreign(hot, path)


def _check_set(hot: Path, path: Path) -> Iterator[Finding]:
    name = str(path.relative_to(hot))
    if not is_digest(f"sha256:{path.name}"):
        yield _foreign(hot, path)
        return
    digests = [[file.name, _digest_of(file)] for file in finished_in(path)]
    actual = sha256_json(digests)
    if actual == f"sha256:{path.name}" or not path.exists():  # evicted meanwhile
        return
    hint = "it is mended when it is next loaded; or --repair removes it"
    message = "its files are not those that its name says"
    yield Finding("hot copy", "error", name, message, expected=f"sha256:{path.name}", actual=actual, hint=hint)


def _check_file(hot: Path, path: Path, in_sets: set[int]) -> Iterator[Finding]:
    digest, status = f"sha256:{path.name}", status_of(path)
    if not is_digest(digest):
        yield _foreign(hot, path)
    elif status is not None and (actual := _digest_of(path)) != digest and path.exists():
        name, hint = str(path.relative_to(hot)), "it is made anew when it is next loaded; or --repair removes it"
        message = "its bytes are not what its name says"
        yield Finding("hot copy", "error", name, message, digest, status.st_size, digest, actual, hint)
    elif status is not None and status.st_ino not in in_sets:
        name, hint = str(path.relative_to(hot)), "`aotc gc --cache` removes it"
        yield Finding("unreferenced", "garbage", name, "no set holds it", digest, status.st_size, hint=hint)


def _digest_of(path: Path) -> str:
    """What the file holds; what is none has no digest."""
    status = status_of(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return "no regular file"
    with typed_errors("read", path):
        try:
            return sha256_file(path)
        except FileNotFoundError:
            return "nothing"


def _foreign(hot: Path, path: Path) -> Finding:
    hint = "move it away if nobody needs it there"
    return Finding("foreign file", "warning", os.fspath(path.relative_to(hot)), "aotc did not put it there", hint=hint)
