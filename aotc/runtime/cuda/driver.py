"""CUDA's driver, where torch has no way to it that is as quick.

By ctypes, since `cuda.bindings`, which comes with torch, takes 56 ms to import. Source: CUDA Driver API.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import defaultdict
from typing import Any

import torch

_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: what others do on the default stream neither waits for it nor disturbs a capture on it."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def ask(function: str, *arguments: Any) -> None:
    """Call the driver. Raises RuntimeError for what it refuses."""
    if error := getattr(_driver(), function)(*arguments):
        raise RuntimeError(f"{function}: CUresult {error}")


_idle: defaultdict[int, list[int]] = defaultdict(list)
"""Streams by the index of their device, of objects that are gone. None is ever destroyed: cuBLAS and cuDNN remember the
last one that they were given, and the process crashes at its end where that stream was destroyed."""


def make_stream(owner: object, device: torch.device) -> torch.cuda.Stream:
    """A stream of its own for as long as `owner` lives. `device` has an index.

    torch makes its 32 streams of each of four priorities when it is first asked for one, which takes 2.4 ms (H200).
    A stream object of torch (2.11) does not clear weak references to it, and a finalizer on one crashes at exit.
    """
    idle = _idle[device.index]
    try:
        handle = idle.pop() if idle else _create(device)
    except (OSError, AttributeError, RuntimeError, IndexError):  # no context in this thread, say; another was quicker
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    weakref.finalize(owner, idle.append, handle).atexit = False
    return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]


def _create(device: torch.device) -> int:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        ask("cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
    assert handle.value
    return handle.value
