"""A GPU's library through its C interface, which can take its arguments over: torch's runner holds them until its end.

For libraries without constants of their own, which call no operator by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aotc.runtime.libraries.files import opened
from aotc.runtime.libraries.library import CLibrary

if TYPE_CHECKING:
    from aotc.runtime.libraries.library_folder import LibraryFiles


def open_cuda_library(files: LibraryFiles, device: torch.device) -> CudaCLibrary:
    """Raises LibraryError."""
    with ExitStack() as stack:
        path = stack.enter_context(opened(files, str(device)))
        with torch.cuda.device(device):  # the library makes its device the current one
            library = CudaCLibrary(path, device)
        if len(files.names) > 1:  # kernels beside the library are read at their first launch
            weakref.finalize(library, stack.pop_all().close)
        return library


class CudaCLibrary(CLibrary):
    """Launches on the current stream of its own device, whatever device is current. It has one model, which only one
    thread may run: so calls keep the GIL."""

    _open = ctypes.PyDLL
    _run_name = "AOTInductorModelContainerRunSingleThreaded"  # the other one asks events, which a capture makes invalid

    def __init__(self, path: str, device: torch.device) -> None:
        self._device = device
        super().__init__(path, 1, None, str(device), os.path.dirname(path))  # noqa: PTH120

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        with self._current():
            return super().run(arguments)

    def consume(self, arguments: list[Tensor]) -> list[Tensor]:
        with self._current():
            return super().consume(arguments)

    def _current(self) -> contextlib.AbstractContextManager[object]:
        is_current = torch._C._cuda_getDevice() == self._device.index  # torch.cuda.current_device asks more
        return contextlib.nullcontext() if is_current else torch.cuda.device(self._device)

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._device.index))
