"""A variant's library, opened over `aotc.core._cpu` in the place of torch.

The library names `libtorch_cpu.so`; one for a GPU also the driver's library, which stays. Its bytes, checked as they
come from the store, get the name of our own library in that place, so that a process may hold torch beside it. Every
symbol is bound at the open (`RTLD_NOW`), after it was looked for: what is missing is named there, all of it, and no
call can find a function missing.
"""

from __future__ import annotations

import ctypes
import io
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aotc.errors import CorruptError, Issue, LibraryError
from aotc.machine.elf import Bytes, defined_symbols, rename_needed, undefined_in, unversioned_in
from aotc.machine.forks import end_threads_before_forks
from aotc.records import CONSTANTS, Constant, File, Variant, bucket_name
from aotc.standalone.cpu_environment import open_cpu
from aotc.standalone.gpu_environment import on_the_gpu
from aotc.store.files.anonymous import anonymous_file, path_of, seal, typed_errors_of
from aotc.store.files.disk import map_privately
from aotc.store.layout.blob_reader import BlobReader

OURS = "libaotc_cpu.so"
OF_TORCH = frozenset({"libtorch_cpu.so", "libtorch_cuda.so", "libtorch.so", "libc10.so", "libc10_cuda.so"})
DRIVER = "libcuda.so.1"

_OPERATOR = re.compile(r"aoti_torch_(?:cpu|cuda)_(?P<name>\w+)")
_WITH_TORCH = "load it with aotc.load, where torch is installed; or compile the model without them"


class OpenedLibrary(NamedTuple):
    """A variant's library, as `Table` of `aotc.core._cpu` takes it: the handle of `dlopen`, and its frozen weights."""

    handle: int
    constants: tuple[tuple[str, Any], ...]


def opened_library(variant: Variant, source: BlobReader, gpu: int | None = None) -> OpenedLibrary:
    """For the GPU of that number. Raises LibraryError, CorruptError where frozen weights are not those of the record,
    and MemoryLimitError."""
    files = {file.name: file for file in variant.files}
    library = _open(files[variant.library], source, f"bucket {bucket_name(variant.bucket)}", gpu is not None)
    end_threads_before_forks(library)
    constants = _mapped_constants(variant, source) if CONSTANTS in files else ()
    on_gpu = on_the_gpu([tensor for _, tensor in constants], gpu)
    return OpenedLibrary(
        library._handle, tuple((name, tensor) for (name, _), tensor in zip(constants, on_gpu, strict=True))
    )


def _mapped_constants(variant: Variant, source: BlobReader) -> tuple[tuple[str, Any], ...]:
    """Frozen weights with their names, mapped where they lie in the store."""
    core, constants, memory = open_cpu(), constants_of(variant, source), {}
    for file in variant.files:
        if file.mapped:
            with source.open_mapped(file) as stream:
                memory[file.name] = map_privately(stream)
    try:
        return tuple((each.name, _constant(core, each, memory)) for each in constants)
    except (KeyError, ValueError) as error:
        raise CorruptError(f"the frozen weights are not as the record says: {error}", hint="build it again") from error


def constants_of(variant: Variant, source: BlobReader) -> tuple[Constant, ...]:
    """The frozen weights that a library takes from files beside it. Raises LibraryError where oneDNN packed them, and
    CorruptError."""
    (index,) = [file for file in variant.files if file.name == CONSTANTS]
    source.unpack(index, text := io.BytesIO())
    try:
        constants = msgspec.json.decode(text.getvalue(), type=tuple[Constant, ...])
    except ValueError as error:
        raise CorruptError(f"the index of frozen weights cannot be read: {error}", hint="build it again") from error
    if packed := [each.name for each in constants if each.packing]:
        raise LibraryError(
            f"{len(packed)} weights of bucket {bucket_name(variant.bucket)} are packed by oneDNN, a part of torch",
            hint="build with `weights: live`, or load it with aotc.load, where torch is installed",
        )
    return constants


def _constant(core: Any, constant: Constant, memory: dict[str, Any]) -> Any:
    if not constant.file:
        return core.placed(b"", 0, constant.dtype, constant.shape, constant.stride)
    itemsize = core.placed(b"", 0, constant.dtype, (0,), (1,)).itemsize
    offset = constant.offset + constant.storage_offset * itemsize
    return core.placed(memory[constant.file], offset, constant.dtype, constant.shape, constant.stride)


# -- opening ----------------------------------------------------------------------------------------------------------


class _Opened(NamedTuple):
    library: ctypes.CDLL
    path: str


_opened: dict[str, _Opened] = {}
"""By the digest of a library. It stays mapped to the end: it is linked with `nodelete`."""
_opening = threading.RLock()
os.register_at_fork(  # a child would find the lock held for ever
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_opening.release
)


def _open(file: File, source: BlobReader, where: str, for_gpu: bool) -> ctypes.CDLL:
    with _opening:
        if file.digest not in _opened:
            source.unpack(file, data := io.BytesIO())
            _opened[file.digest] = _open_bytes(bytearray(data.getbuffer()), file, where, for_gpu)
        return _opened[file.digest].library


def prepared_library(variant: Variant, source: BlobReader, runtime: Path, name: str) -> bytearray:
    """A variant's library that names the library `runtime`, by `name`, in the place of torch's: of any architecture,
    since nothing is loaded. Raises as `opened_library`."""
    (file,) = [file for file in variant.files if file.name == variant.library]
    source.unpack(file, data := io.BytesIO())
    defined = defined_symbols(runtime)

    def lacking(data: Bytes) -> list[str]:
        return [symbol for symbol in unversioned_in(data) if symbol not in defined]

    return _over(name, lacking, bytearray(data.getbuffer()), file, f"bucket {bucket_name(variant.bucket)}")


def _over(runtime: str, lacking: Callable[[Bytes], list[str]], data: bytearray, file: File, where: str) -> bytearray:
    try:
        missing = lacking(data)
        renamed = rename_needed(data, OF_TORCH, runtime)
    except ValueError as error:
        raise LibraryError(
            f"the library {file.name} of {where} cannot be read: {error}", hint="build it again"
        ) from error
    if missing:
        raise missing_functions(missing, where)
    if not renamed:
        raise LibraryError(f"the library {file.name} of {where} names none of torch's: it is not AOTInductor's")
    return data


def _open_bytes(data: bytearray, file: File, where: str, for_gpu: bool) -> _Opened:
    shims = [ctypes.CDLL(open_cpu().__file__), *([ctypes.CDLL(DRIVER)] if for_gpu else [])]

    def lacking(data: Bytes) -> list[str]:
        return [name for name in undefined_in(data) if not any(hasattr(shim, name) for shim in shims)]

    _over(OURS, lacking, data, file, where)
    _refuse_global_torch()
    with typed_errors_of(file):
        stream = anonymous_file(file.name)
        stream.write(data)
        stream.flush()
    seal(stream)
    path = path_of(stream)
    try:
        with stream:
            return _Opened(ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL), path)
    except OSError as error:
        raise LibraryError(
            f"the library {file.name} of {where} cannot be opened: {error}",
            hint="`GLIBC` or `GLIBCXX` in the reason: it was built on a newer distribution than this one; `executable "
            "stack`: by an older aotc, build it again; `No such file`: /proc is not mounted",
        ) from error


def missing_functions(symbols: Sequence[str], where: str) -> LibraryError:
    """The error of a library that needs functions of torch which are not here: each is named."""
    operators = [found["name"] for symbol in symbols if (found := _OPERATOR.fullmatch(symbol))]
    others = [symbol for symbol in symbols if not _OPERATOR.fullmatch(symbol)]
    issues = [Issue(f"calls torch's operator `{name}`", where=where, expected=name) for name in operators]
    issues += [Issue(f"calls `{name}`", where=where, expected=name) for name in others]
    return LibraryError(
        f"the code of {where} calls {len(symbols)} functions that the standalone runtime does not have",
        issues=tuple(issues),
        hint=_WITH_TORCH,
    )


def _refuse_global_torch() -> None:
    """Names that are global in the process come before a library's own: torch's functions would take ours' place."""
    if hasattr(ctypes.CDLL(None), "aoti_torch_get_data_ptr"):
        raise LibraryError(
            "torch's functions are global in this process (RTLD_GLOBAL, or LD_PRELOAD), and would be called in place "
            "of the standalone runtime's",
            hint="unset TORCH_USE_RTLD_GLOBAL and LD_PRELOAD, or load with aotc.load",
        )
