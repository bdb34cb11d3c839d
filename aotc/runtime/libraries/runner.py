"""Libraries that torch's own runner opens: for GPUs, and on a CPU those that call operators by name.

The runner holds the GIL. On a GPU a call is asynchronous, so that costs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from aotc.errors import LibraryError
from aotc.machine.environment import torch_library
from aotc.machine.forks import end_threads_before_forks, renew_in_child
from aotc.runtime.libraries.files import opened

if TYPE_CHECKING:
    from aotc.runtime.libraries.frozen_weights import LibraryConstants
    from aotc.runtime.libraries.library_folder import LibraryFiles
    from aotc.runtime.libraries.library_protocol import Library

_aoti = cast(Any, torch._C)._aoti


def open_runner(files: LibraryFiles, device: torch.device, concurrency: int, *, calls_back: bool) -> Library:
    """`calls_back`: the library calls operators by name. Raises LibraryError."""
    if device.type == "cuda":
        cuda = _open_cuda(files, device)
        return CallingBack(lambda: cuda, 1) if calls_back else cuda  # CUDA itself does not outlive a fork
    return CallingBack(lambda: _open_runner(files, concurrency), concurrency)


def _open_runner(files: LibraryFiles, concurrency: int) -> RunnerLibrary:
    with opened(files) as path:
        end_threads_before_forks(ctypes.CDLL(path), torch_library())
        runner = _aoti.AOTIModelContainerRunnerCpu(path, concurrency)
        return RunnerLibrary(runner, files.constants(torch.device("cpu")))


def _open_cuda(files: LibraryFiles, device: torch.device) -> CudaLibrary:
    with ExitStack() as stack:
        path = stack.enter_context(opened(files, str(device)))
        with torch.cuda.device(device):  # the library makes its device the current one
            # Of several models it asks for one that is done, by an event that a capture makes invalid.
            runner = _aoti.AOTIModelContainerRunnerCuda(path, 1, str(device), os.path.dirname(path), True)  # noqa: PTH120
            library = CudaLibrary(runner, device, files.constants(device))
        if len(files.names) > 1:  # kernels beside the library are read at their first launch
            weakref.finalize(library, stack.pop_all().close)
        return library


class RunnerLibrary:
    """torch's AOTIModelContainerRunner, which compares the number of arguments itself."""

    counts = None

    def __init__(self, runner: Any, constants: LibraryConstants | None = None) -> None:
        self._runner = runner
        self._constants = constants
        if constants is not None:
            # In the buffer in use, every one of them, as they are.
            runner.update_constant_buffer(constants.tensors, False, True, True)

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        try:
            return cast(list[Tensor], self._runner.run(arguments))
        except RuntimeError as error:
            words = str(error).partition("\nException raised from ")[0]  # then the frames of C++ follow
            raise LibraryError(f"the library failed: {words}") from error


class CudaLibrary(RunnerLibrary):
    """torch's runner for a GPU: launches on the current stream of its own device, whatever device is current."""

    def __init__(self, runner: Any, device: torch.device, constants: LibraryConstants | None = None) -> None:
        self._device = device
        super().__init__(runner, constants)

    def __del__(self) -> None:
        if self._constants is not None:  # their memory is the allocator's, which knows of no other stream's use
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._device)

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        if torch._C._cuda_getDevice() == self._device.index:  # torch.cuda.current_device asks more
            return super().run(arguments)
        with torch.cuda.device(self._device):
            return super().run(arguments)


class CallingBack:
    """A library that calls operators by name, which may be Python's.

    At most `concurrency` threads are inside. Further ones wait here, where they let go of the GIL, which one inside may
    need to go on: torch's runner would hold it while it waits for a model. One that is inside does not wait for itself.

    A forked child opens it anew at its first call: threads that were inside at the fork have taken models with them.
    """

    def __init__(self, open_runner: Callable[[], RunnerLibrary], concurrency: int) -> None:
        self._open_runner, self._concurrency = open_runner, concurrency
        library = open_runner()
        self.counts = library.counts
        self._run = library.run
        self._renew_turns()
        renew_in_child(self, CallingBack._renew)

    def _renew_turns(self) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()  # a signal's handler may use it while its thread does
        for _ in range(self._concurrency):
            self._free.put(None)
        self._inside: dict[object, int] = {}
        self._opening = threading.RLock()

    def _renew(self) -> None:
        self._renew_turns()
        self._run = self._run_first

    def _run_first(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        with self._opening:
            if self._run == self._run_first:
                self._run = self._open_runner().run
        return self._run(arguments)

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """A signal's handler may raise after any call: so a turn is taken and given back in one call of C each."""
        thread, free, inside = threading.get_ident(), self._free, self._inside
        token: object = object()
        turn: list[None] = []
        given_back = map(free.put, turn)
        take = map(free.get, (thread not in inside.values(),))  # it waits, unless this thread is inside
        try:
            inside[token] = thread
            try:
                turn.extend(take)
                return self._run(arguments)
            except Empty:
                raise LibraryError(
                    "the library was called from within itself, by an operator of Python's or a signal's handler, and "
                    "has no model left for that call",
                    hint="call it elsewhere, or load with a higher `concurrency`",
                ) from None
            finally:
                any(given_back)
        finally:
            inside.pop(token, None)
