"""Opening a compiled library and running it, through nothing but what `import torch` has already loaded.

Two ways in, one interface:

- `CLibrary`: AOTInductor's C interface by ctypes (torch/csrc/inductor/aoti_runtime/interface.h). ctypes releases the
  GIL for the whole call, so on a CPU other threads run meanwhile, and `concurrency` of them inside the library itself.
- `RunnerLibrary`: torch's own runner, which holds the GIL. On CUDA a call is asynchronous, so that costs nothing; on a
  CPU it is for the libraries that call back into torch by name (a `.json` beside the library).

Neither checks what it is given: a wrong dtype, stride or count is a wrong answer or a crash. Callers check first.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from aotc.errors import CorruptError, LibraryError
from aotc.machine.environment import cpu_features
from aotc.records import Variant, bucket_name
from aotc.runtime.after_fork import renew_in_child
from aotc.runtime.library_files import LibraryFiles
from aotc.runtime.openmp import end_threads_before_forks

_aoti = cast(Any, torch._C)._aoti


class Library(Protocol):
    """A compiled library, ready to run.

    counts: how many tensors it takes and gives; None where it does not tell.
    """

    @property
    def counts(self) -> tuple[int, int] | None: ...

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Run on exactly the arguments that the record names, in its order; gives the library's outputs."""
        ...


def open_library(files: LibraryFiles, device: torch.device, concurrency: int) -> Library:
    """Open the library of one variant. Raises LibraryError with the loader's own reason."""
    cpu_features()  # asks the kernel for AMX's tiles, without which such a library would end the process
    calls_back = Path(files.library).with_suffix(".json").name in files.names
    if device.type == "cuda":
        cuda = _open_cuda(files, device)
        return CallingBack(lambda: cuda, 1) if calls_back else cuda  # CUDA itself does not outlive a fork
    if calls_back:
        return CallingBack(lambda: _open_runner(files, concurrency), concurrency)
    with _opened(files) as path:
        return CLibrary(path, concurrency)


def _open_runner(files: LibraryFiles, concurrency: int) -> RunnerLibrary:
    with _opened(files) as path:
        end_threads_before_forks(ctypes.CDLL(path))
        return RunnerLibrary(_aoti.AOTIModelContainerRunnerCpu(path, concurrency))


def _open_cuda(files: LibraryFiles, device: torch.device) -> CudaLibrary:
    with ExitStack() as stack:
        path = stack.enter_context(_opened(files))
        with torch.cuda.device(device):  # the library makes its device the current one
            # Of several models it asks for one that is done, by an event that a capture makes invalid.
            runner = _aoti.AOTIModelContainerRunnerCuda(path, 1, str(device), os.path.dirname(path), True)  # noqa: PTH120
        library = CudaLibrary(runner, device)
        if len(files.names) > 1:  # kernels beside the library are read at their first launch
            weakref.finalize(library, stack.pop_all().close)
        return library


@contextmanager
def _opened(files: LibraryFiles) -> Iterator[str]:
    try:
        with files.opened() as path:
            yield path
    except (OSError, RuntimeError, AttributeError) as error:
        raise LibraryError(
            f"the library {files.library} cannot be opened: {error}",
            hint="`GLIBC` or `GLIBCXX` in the reason: it was built on a newer distribution than this one; "
            "`undefined symbol`: with another torch; `No such file`: /proc is not mounted",
        ) from error


def check_counts(library: Library, variant: Variant) -> None:
    """Whether a library takes and gives as many tensors as its record says; of others it would read and write memory
    that is not its own. Raises CorruptError."""
    if library.counts is None:
        return
    taken, given = library.counts
    indices = [output.index for output in variant.outputs if output.index is not None]
    if taken != len(variant.arguments) or given <= max(indices, default=-1):
        raise CorruptError(
            f"the library of bucket {bucket_name(variant.bucket)} takes {taken} tensors and gives {given}; its record "
            f"names {len(variant.arguments)} and output {max(indices, default=-1)}",
            hint="the record is another build's: build it again",
            expected=f"{len(variant.arguments)} arguments",
            actual=f"{taken} arguments, {given} outputs",
        )


class RunnerLibrary:
    """torch's AOTIModelContainerRunner, which compares the number of arguments itself."""

    counts = None

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        try:
            return cast(list[Tensor], self._runner.run(arguments))
        except RuntimeError as error:
            words = str(error).partition("\nException raised from ")[0]  # then the frames of C++ follow
            raise LibraryError(f"the library failed: {words}") from error


class CudaLibrary(RunnerLibrary):
    """torch's runner for a GPU: launches on the current stream of its own device, whatever device is current."""

    def __init__(self, runner: Any, device: torch.device) -> None:
        super().__init__(runner)
        self._device = device

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


_allocate_handles = cast(Callable[[Sequence[Tensor]], list[Any]], _aoti.unsafe_alloc_void_ptrs_from_tensors)
_tensors_of = cast(Callable[[list[Any]], list[Tensor]], _aoti.alloc_tensors_by_stealing_from_void_ptrs)
_Pointer = ctypes.c_void_p
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = _Pointer
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [_Pointer, ctypes.c_char_p, _Pointer]


_IN_TORCH = " API call failed at "
"""Stands in what a library raises where an operator of torch's has failed, whose own words torch keeps."""


def _raised_in_torch() -> str:
    """What an operator has raised last in this thread (torch/csrc/stable/c/shim.h)."""
    words = ctypes.CDLL(
        str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    ).torch_exception_get_what_without_backtrace
    words.restype = ctypes.c_char_p
    return cast(bytes, words()).decode(errors="replace")


class CLibrary:
    """A CPU library through its C interface.

    `unsafe_alloc_void_ptrs_from_tensors` gives each argument as a new handle, which the library takes over; its
    outputs are handles that `alloc_tensors_by_stealing_from_void_ptrs` turns into tensors.

    A forked child makes a container of its own at its first call. The one that it inherits waits for threads that were
    inside at the fork, of which the child has none; it is left as it is.
    """

    def __init__(self, path: str, concurrency: int) -> None:
        self._container = _Pointer()
        self._library = ctypes.CDLL(path)
        end_threads_before_forks(self._library)
        self._concurrency = ctypes.c_size_t(concurrency)
        self._making = threading.RLock()
        self._make_container()
        self._input_count = self._count("AOTInductorModelContainerGetNumInputs")
        self._output_count = self._count("AOTInductorModelContainerGetNumOutputs")
        self._inputs = _Pointer * self._input_count.value
        self._outputs = _Pointer * self._output_count.value
        renew_in_child(self, CLibrary._renew)

    def _make_container(self) -> None:
        self._call(
            "AOTInductorModelContainerCreateWithDevice",
            ctypes.byref(self._container),
            self._concurrency,
            b"cpu",
            None,
        )
        # Every argument of a call is a ctypes object already; declared argtypes would only convert it once more.
        self._run: Callable[..., int] = self._library.AOTInductorModelContainerRun

    def _renew(self) -> None:
        self._container = _Pointer()
        self._making = threading.RLock()
        self._run = self._run_first

    def _run_first(self, _: Any, *arguments: Any) -> int:
        with self._making:
            if not self._container:
                self._make_container()
        return cast(int, self._library.AOTInductorModelContainerRun(self._container, *arguments))

    @property
    def counts(self) -> tuple[int, int]:
        return self._input_count.value, self._output_count.value

    def _call(self, function: str, *arguments: Any) -> None:
        if getattr(self._library, function)(*arguments) != 0:
            raise LibraryError(f"{function} failed: {self._reason()}")

    def _count(self, function: str) -> ctypes.c_size_t:
        number = ctypes.c_size_t()
        self._call(function, self._container, ctypes.byref(number))
        return number

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        if len(arguments) != self._input_count.value:
            raise LibraryError(
                f"the library takes {self._input_count.value} tensors, the record names {len(arguments)}"
            )
        inputs = self._inputs(*[_get_pointer(capsule, None) for capsule in _allocate_handles(arguments)])
        outputs = self._outputs()
        taken: list[list[Tensor]] = []
        try:
            status = self._run(self._container, inputs, self._input_count, outputs, self._output_count, None, None)
            if status != 0:
                raise LibraryError(f"the library failed: {self._reason()}")
            taken.extend(map(_tensors_of, ([_new_capsule(pointer, None, None) for pointer in outputs],)))
            return taken[0]
        except BaseException:
            if not taken:  # a signal that came while the library ran: else what it has given would stay for ever
                _tensors_of([_new_capsule(pointer, None, None) for pointer in outputs if pointer])
            raise

    def _reason(self) -> str:
        """What the library has raised in this thread's last call. Those of torch before 2.13 do not say."""
        raised = ctypes.c_char_p()
        try:
            self._library.AOTInductorGetLastError(ctypes.byref(raised))
        except AttributeError:
            return "it wrote its reason to standard error"
        words = (raised.value or b"").decode(errors="replace")
        return _raised_in_torch() if _IN_TORCH in words else words

    def __del__(self) -> None:
        if self._container:
            self._library.AOTInductorModelContainerDelete(self._container)
