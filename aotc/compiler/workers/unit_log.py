"""The log of a unit: what its processes say, kept where it failed."""

from __future__ import annotations

import re
from pathlib import Path

from aotc.compiler.plan import Unit
from aotc.store.files.disk import typed_errors

LONGEST_NAME = 150
"""Bytes of a unit's name in that of its log, of whose name a file system takes 255, or fewer."""


def log_name(unit: Unit) -> str:
    """The unit's name; where that is too long, its beginning and part of the key."""
    name = re.sub(r"[^A-Za-z0-9._=-]+", "_", unit.name)
    return f"{name}.log" if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{unit.key[7:23]}.log"


def begin_log(path: Path) -> None:
    """Begin an empty log of our own: what another build left there goes, and a link or pipe is not written through.

    Raises StoreError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with typed_errors("write", path):
        path.unlink(missing_ok=True)
        path.touch(exist_ok=False)
