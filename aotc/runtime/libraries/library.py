"""Opening a compiled library and running it, through nothing but what `import torch` has already loaded.

On a CPU that is AOTInductor's C interface by ctypes (torch/csrc/inductor/aoti_runtime/interface.h). ctypes releases
the GIL for the whole call, so other threads run meanwhile, and `concurrency` of them inside the library itself.
Libraries for GPUs, and those that call operators by name, are opened by torch's own runner (`runner`).

Neither checks what it is given: a wrong dtype, stride or count is a wrong answer or a crash. Callers check first.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from aotc.errors import CorruptError, LibraryError
from aotc.machine.environment import cpu_features, torch_library
from aotc.machine.forks import end_threads_before_forks, renew_in_child
from aotc.records import Variant, bucket_name
from aotc.runtime.libraries.files import opened

if TYPE_CHECKING:
    from aotc.runtime.libraries.frozen_weights import LibraryConstants
    from aotc.runtime.libraries.library_folder import LibraryFiles
    from aotc.runtime.libraries.library_protocol import Library

_aoti = cast(Any, torch._C)._aoti


def open_library(files: LibraryFiles, device: torch.device, concurrency: int) -> Library:
    """Open the library of one variant. Raises LibraryError with the loader's own reason."""
    cpu_features()  # asks the kernel for AMX's tiles, without which such a library would end the process
    if device.type == "cuda" or calls_back(files):
        from aotc.runtime.libraries.runner import open_runner

        return open_runner(files, device, concurrency, calls_back=calls_back(files))
    with opened(files) as path:
        return CLibrary(path, concurrency, files.constants(device))


def calls_back(files: LibraryFiles) -> bool:
    """Whether the library calls operators by name."""
    return Path(files.library).with_suffix(".json").name in files.names


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


_allocate_handles = cast(Callable[[Sequence[Tensor]], list[Any]], _aoti.unsafe_alloc_void_ptrs_from_tensors)
_tensors_of = cast(Callable[[list[Any]], list[Tensor]], _aoti.alloc_tensors_by_stealing_from_void_ptrs)
_Pointer = ctypes.c_void_p
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = _Pointer
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [_Pointer, ctypes.c_char_p, _Pointer]


class _ConstantEntry(ctypes.Structure):
    """AOTInductorConstantMapEntry"""

    _fields_ = (("name", ctypes.c_char_p), ("handle", _Pointer))


_IN_TORCH = " API call failed at "
"""Stands in what a library raises where an operator of torch's has failed, whose own words torch keeps."""


class CLibrary:
    """A CPU library through its C interface.

    `unsafe_alloc_void_ptrs_from_tensors` gives each argument as a new handle, which the library takes over; its
    outputs are handles that `alloc_tensors_by_stealing_from_void_ptrs` turns into tensors.

    A forked child makes a container of its own at its first call. The one that it inherits waits for threads that were
    inside at the fork, of which the child has none; it is left as it is.
    """

    _open: Callable[[str], ctypes.CDLL] = ctypes.CDLL
    _run_name = "AOTInductorModelContainerRun"

    def __init__(
        self,
        path: str,
        concurrency: int,
        constants: LibraryConstants | None = None,
        device: str = "cpu",
        kernels: str | None = None,
    ) -> None:
        """`kernels` is the folder with those of a GPU."""
        self._container = _Pointer()
        self._constants = constants
        self._constant_handles: list[ctypes.c_void_p] = []
        self._place = device.encode(), kernels and kernels.encode()
        self._library = self._open(path)
        end_threads_before_forks(self._library, torch_library())
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
            *self._place,
        )
        if self._constants is not None:
            self._bind(self._constants)
        # Every argument of a call is a ctypes object already; declared argtypes would only convert it once more.
        self._run: Callable[..., int] = getattr(self._library, self._run_name)

    def _bind(self, constants: LibraryConstants) -> None:
        """The container keeps the handles, without owning them."""
        capsules = _allocate_handles(list(constants.tensors.values()))
        handles = [_Pointer(_get_pointer(capsule, None)) for capsule in capsules]
        self._constant_handles += handles
        names = map(str.encode, constants.tensors)
        entries = (_ConstantEntry * len(handles))(*map(_ConstantEntry, names, handles))
        self._call(
            "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs",
            self._container,
            entries,
            ctypes.c_size_t(len(entries)),
            ctypes.c_bool(False),  # the buffer in use
            ctypes.c_bool(True),  # every constant must be among them
        )

    def _renew(self) -> None:
        self._container = _Pointer()
        self._making = threading.RLock()
        self._run = self._run_first

    def _run_first(self, _: Any, *arguments: Any) -> int:
        with self._making:
            if not self._container:
                self._make_container()
        return cast(int, getattr(self._library, self._run_name)(self._container, *arguments))

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
        return self._run_on(self._handles(arguments))

    def consume(self, arguments: list[Tensor]) -> list[Tensor]:
        """As `run`. Empties the list, so that the library frees each argument after its last use."""
        handles = self._handles(arguments)
        arguments.clear()
        return self._run_on(handles)

    def _handles(self, arguments: Sequence[Tensor]) -> Any:
        if len(arguments) != self._input_count.value:
            raise LibraryError(
                f"the library takes {self._input_count.value} tensors, the record names {len(arguments)}"
            )
        return self._inputs(*[_get_pointer(capsule, None) for capsule in _allocate_handles(arguments)])

    def _stream(self) -> ctypes.c_void_p | None:
        return None

    def _run_on(self, inputs: Any) -> list[Tensor]:
        """Run on handles, which the library takes over."""
        outputs = self._outputs()
        counts = self._input_count, self._output_count
        taken: list[list[Tensor]] = []
        try:
            status = self._run(self._container, inputs, counts[0], outputs, counts[1], self._stream(), None)
            if status != 0:
                raise LibraryError(f"the library failed: {self._reason()}")
            taken.extend(map(_tensors_of, ([_new_capsule(pointer, None, None) for pointer in outputs],)))
            return taken[0]
        except BaseException:
            if not taken:  # a signal that came while the library ran: else what it has given would stay for ever
                _tensors_of([_new_capsule(pointer, None, None) for pointer in outputs if pointer])
            raise

    def _reason(self) -> str:
        """The library's error in this thread's last call; those before torch 2.13 keep none."""
        raised = ctypes.c_char_p()
        try:
            self._library.AOTInductorGetLastError(ctypes.byref(raised))
        except AttributeError:
            return "it wrote its reason to standard error"
        words = (raised.value or b"").decode(errors="replace")
        if _IN_TORCH not in words:
            return words
        of_operator = torch_library().torch_exception_get_what_without_backtrace  # torch/csrc/stable/c/shim.h
        of_operator.restype = ctypes.c_char_p
        return cast(bytes, of_operator()).decode(errors="replace")

    def __del__(self) -> None:
        if self._container:
            self._library.AOTInductorModelContainerDelete(self._container)
        for handle in self._constant_handles:
            self._library.aoti_torch_delete_tensor_object(handle)
