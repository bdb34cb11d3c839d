"""Checks of what every unit needs of this machine, made once before the first one is compiled."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from aotc.amounts import size_text
from aotc.compiler.planning.estimate import Estimate
from aotc.compiler.workers.unit_process import check_compilable
from aotc.errors import BuildError, StoreError
from aotc.machine.cpp_compiler import NOT_RUN, compiler_name, compiler_version
from aotc.store.files.disk import typed_errors

LEAST_DISK = 32 << 20
"""Bytes for the temporary files of one small unit, or for its files in a store."""


def check_host(store: Path, known: Estimate) -> None:
    """`known` is what the store's units are expected to take.

    Raises BuildError without a C++ compiler; StoreError where the disk of the store or of temporary files is full, and
    for a folder of temporary files in which nothing can be compiled.
    """
    if NOT_RUN in compiler_version():
        raise BuildError(
            f"the C++ compiler `{compiler_name()}` cannot be run, and every unit needs it",
            hint="install g++, or name another compiler by CXX; `aotc doctor` checks it",
        )
    temporary = Path(tempfile.gettempdir())
    check_compilable(temporary)
    _check_disk(temporary, LEAST_DISK, "set TMPDIR to a folder with more, or free some")
    _check_disk(store, max(LEAST_DISK, sum(known.disk.values()) + known.weights), "free some, or `aotc gc` the store")


def _check_disk(folder: Path, least: int, hint: str) -> None:
    free = _free(next(one for one in (folder, *folder.absolute().parents) if one.exists()))
    if free < least:
        raise StoreError(
            f"the disk of {folder} has {size_text(free)} free, and the build needs about {size_text(least)} there",
            hint=hint,
            path=str(folder),
            expected=least,
            actual=free,
        )


def _free(place: Path) -> int:
    with typed_errors("look at", place):
        return shutil.disk_usage(place).free
