"""For the hot copies only, until they go."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from aotc.store.disk import files_in, status_of
from aotc.store.locks import is_held

PRIVATE_FOLDER = re.compile(r"aotc-hot-[a-z0-9_]{8}")
"""A process's own hot copies, where the cache folder could not be used."""


def dead_folders(parent: Path, name: re.Pattern[str], before: float) -> Iterator[Path]:
    """This user's folders of that name which no process holds and which did not change since `before`."""
    for path in files_in(parent):
        if name.fullmatch(path.name) and (status := status_of(path)) is not None:
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if ours and status.st_mtime <= before and not is_held(path):
                yield path
