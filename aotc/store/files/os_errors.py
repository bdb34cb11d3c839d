"""Errors of files: those of the OS, with what to do about them, and of things that are not files to read."""

from __future__ import annotations

import errno
from pathlib import Path

from aotc.errors import CorruptError, StoreError

_NO_LOCKS = "this file system has no locks: put the store, AOTC_CACHE_DIR and TMPDIR on one that has"
_HINTS = {
    errno.ENOSPC: "the disk is full: free space, or use a folder on another disk",
    errno.EDQUOT: "the disk quota is used up: free space, or use a folder on another disk",
    errno.EROFS: "the file system is mounted read-only: use a folder that can be written",
    errno.EACCES: "give this user permission for it, or use a folder of its own",
    errno.EPERM: "give this user permission for it, or use a folder of its own",
    errno.ENOTDIR: "a file stands where a folder should be: move it away, or use another folder",
    errno.EEXIST: "a file stands where a folder should be: move it away, or use another folder",
    errno.EISDIR: "a folder stands where a file should be: move it away",
    errno.ELOOP: "a symbolic link stands where a file or folder should be: move it away",
    errno.ENOLCK: _NO_LOCKS,
    errno.ENOSYS: _NO_LOCKS,
    errno.EOPNOTSUPP: _NO_LOCKS,
    errno.EMFILE: "the process has too many files open: raise `ulimit -n`",
    errno.EIO: "the disk reports an input/output error: check the disk",
    errno.ESTALE: "the network file system lost the file: try again",
}


def store_error(action: str, path: Path, error: OSError, hint: str = "") -> StoreError:
    return StoreError(
        f"cannot {action} {path}: {error.strerror or error}",
        hint=_HINTS.get(error.errno or 0, hint),
        path=str(path),
        errno=error.errno,
    )


def not_as_expected(path: Path, flaw: str, expected: str, actual: str) -> CorruptError:
    return CorruptError(f"{path} {flaw}", path=str(path), expected=expected, actual=actual)
