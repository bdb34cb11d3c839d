"""OpenMP's threads end before a fork: a child has none of them, and would wait for them in its first parallel loop.

GNU's OpenMP keeps a pool for each thread that has run such a loop. Only the forking thread's is known to the child; the
parent's next loop starts its threads anew.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

_SOFT = 1
"""`omp_pause_soft` of omp.h: what the program itself keeps in OpenMP's threads may stay."""

_pauses: dict[int | None, Callable[[int], int]] = {}


def end_threads_before_forks(library: ctypes.CDLL) -> None:
    """From now on: those that torch runs, and those of a compiled library, whose OpenMP may be another file."""
    for user in (library, _torch()):
        try:
            pause = user.omp_pause_resource_all  # sought in what it is linked to, too
        except AttributeError:
            continue
        _pauses[ctypes.cast(pause, ctypes.c_void_p).value] = pause


@functools.cache
def _torch() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _end_threads() -> None:
    for pause in list(_pauses.values()):
        pause(_SOFT)


os.register_at_fork(before=_end_threads)
