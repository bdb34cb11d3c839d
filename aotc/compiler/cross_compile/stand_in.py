"""Load the libraries that stand in for CUDA's in this process, and say which GPU they are. Nothing here imports torch.

A process finds a library by its name (SONAME): one that is loaded under that name already is taken in the place of the
real one. So they are loaded before torch is, in processes that a build starts for this alone, and in no others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

_loaded: list[ctypes.CDLL] = []

COUNT = 512
"""Attributes of a device that the libraries hold."""


WARP_SIZE = 10
"""CU_DEVICE_ATTRIBUTE_WARP_SIZE, cuda.h."""


def load(paths: Sequence[str]) -> None:
    """Load the libraries. Until `become` they report a GPU of no name: torch asks only once how many there are. Raises
    OSError."""
    for path in paths:
        _loaded.append(ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL))
    if paths:
        become("a GPU", 1, {WARP_SIZE: 32})


def become(name: str, memory: int, attributes: Mapping[int, int]) -> None:
    """Be a GPU of that name, with so many bytes of memory. `attributes` are by number, as in `aotc.machine.gpus`.

    Raises RuntimeError in a process that did not load the libraries.
    """
    if not _loaded:
        raise RuntimeError("this process was not started for a GPU that the machine lacks")
    values = (ctypes.c_int * COUNT)(*(attributes.get(number, 0) for number in range(COUNT)))
    for library in _loaded:
        library.aotc_absent_gpu(name.encode(), ctypes.c_size_t(memory), values, COUNT)


def is_loaded() -> bool:
    return bool(_loaded)


@contextmanager
def launches_ignored() -> Iterator[None]:
    """While active, a launch of a kernel does nothing; otherwise it is an error, as what it computes would be wrong."""
    for library in _loaded:
        library.aotc_ignore_launches(1)
    try:
        yield
    finally:
        for library in _loaded:
            library.aotc_ignore_launches(0)
