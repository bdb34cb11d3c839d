"""The log of a unit: the output of its processes, kept if the unit failed."""

from __future__ import annotations

import re
from pathlib import Path

from aotc.compiler.plan import Unit
from aotc.store.files.disk import typed_errors

LONGEST_NAME = 150
"""Bytes of a unit's name in the name of its log; file systems limit names to 255 bytes, or fewer."""


def log_name(unit: Unit) -> str:
    """The file name of a unit's log: the unit's name; if that is too long, its beginning and a part of the key."""
    name = re.sub(r"[^A-Za-z0-9._=-]+", "_", unit.name)
    return f"{name}.log" if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{unit.key[7:23]}.log"


def begin_log(path: Path) -> None:
    """Create an empty log. A file of another build is removed first, and so is a link or a pipe.

    Raises StoreError.
    """
    with typed_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(exist_ok=False)
