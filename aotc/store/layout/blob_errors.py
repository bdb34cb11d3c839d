"""Errors of blobs that are missing, unreadable or not what they should be."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from aotc.errors import CorruptError, NotFoundError
from aotc.store.files.os_errors import store_error


def corrupt(what: str, expected: str, actual: str, path: Path) -> CorruptError:
    return CorruptError(
        f"{path} is corrupt: its {what} should be {expected} and is {actual}",
        hint="remove damaged blobs with `aotc fsck --repair`, then build or fetch the bundle again",
        path=str(path),
        expected=expected,
        actual=actual,
        flaw=what,
        digest=f"sha256:{path.name}",
    )


def unreadable(path: Path, error: OSError) -> NoReturn:
    """Raises NotFoundError where there is no such blob, else StoreError."""
    typed = store_error("read", path, error)
    if not isinstance(error, FileNotFoundError):
        raise typed from error
    typed.__cause__ = error
    digest = f"sha256:{path.name}"
    raise NotFoundError(
        f"the blob {digest} is not in the store ({path})",
        hint="`aotc fsck --repair` removed it as damaged, or the store was copied in part: "
        "build or fetch the bundle again",
        known=(),
        digest=digest,
    ) from typed
