"""Frozen weights of an open library: mapped from their files, once for all buckets and, as page cache, all processes.

Tensors are made of them as AOTInductor makes those of constants within a library (`load_constants` of its
model_base.h): on the memory as it is, with the layout that was recorded, packed by oneDNN or not.

How oneDNN packs a weight depends on the process: its number of threads and its CPU. A convolution repacks a weight of
another format in each call, which can cost as much as the convolution. If the process differs from the build's, a load
repacks such weights once, into memory of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, cast

import msgspec
import torch
from torch import Tensor

from aotc.errors import CorruptError, LibraryError
from aotc.machine.environment import torch_library
from aotc.records import Constant, PackCall
from aotc.store.files.disk import map_privately

_tensors_of = cast(Any, torch._C)._aoti.alloc_tensors_by_stealing_from_void_ptrs
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class MappedWeights:
    """The bytes of one file: mapped, and on a GPU copied there once."""

    def __init__(self, stream: BinaryIO) -> None:
        """Closes the stream. Nothing is written to the file. Raises OSError."""
        with stream:
            mapped = map_privately(stream)
        self._on = {"cpu": torch.frombuffer(mapped, dtype=torch.uint8)}
        self.packed: dict[tuple[int, PackCall], Tensor] = {}
        """By the offset in the file and the call: weights packed for this process."""

    def on(self, device: torch.device) -> Tensor:
        if str(device) not in self._on:
            from aotc.runtime.checkpoints.staged import copy_to_gpu

            placed = torch.empty_like(self._on["cpu"], device=device)
            for rest, source in copy_to_gpu([(placed, self._on["cpu"])], device):
                rest.copy_(source)
            self._on[str(device)] = placed
        return self._on[str(device)]


class LibraryConstants:
    """Constants of a library, by their names in it. This object keeps their memory; the tensors do not."""

    def __init__(self, index: bytes, weights: Mapping[str, MappedWeights], device: torch.device) -> None:
        """`index` is the file CONSTANTS of a variant, `weights` are its files by name. Raises CorruptError."""
        try:
            constants = msgspec.json.decode(index, type=tuple[Constant, ...])
            self._memory: list[Tensor] = []
            self.tensors = {each.name: self._tensor(each, weights, device) for each in constants}
        except LibraryError:
            raise
        except (ValueError, KeyError, AttributeError, RuntimeError) as error:
            raise CorruptError(
                f"the constants of a library cannot be read: {error!r}", hint="build the artifact again"
            ) from error

    def _tensor(self, constant: Constant, weights: Mapping[str, MappedWeights], device: torch.device) -> Tensor:
        on = device if constant.device == "cuda" else torch.device("cpu")
        address = None
        if constant.file:
            memory = weights[constant.file].on(on)
            self._memory.append(memory)
            address = memory.data_ptr() + constant.offset
        tensor = _tensor_at(address, constant, on)
        if constant.packed_by is None or _packs_as(constant.packed_by):
            return tensor
        packed, place = weights[constant.file].packed, (constant.offset, constant.packed_by)
        if place not in packed:
            pack = getattr(torch.ops.mkldnn, constant.packed_by.operator)
            packed[place] = pack(tensor.to_dense(), *constant.packed_by.arguments)
        return packed[place]


def _packs_as(call: PackCall) -> bool:
    """Whether oneDNN chooses the same memory format in this process as where the weight was packed."""
    return (torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()) == (call.threads, call.capability)


def _tensor_at(address: int | None, constant: Constant, device: torch.device) -> Tensor:
    """By AOTInductor's C interface (torch/csrc/inductor/aoti_torch/c/shim.h)."""
    torch_c = torch_library()
    layout = torch_c.aoti_torch_layout__mkldnn if constant.packing else torch_c.aoti_torch_layout_strided
    handle = ctypes.c_void_p()
    failed = torch_c.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(len(constant.shape)),
        _integers(constant.shape),
        _integers(constant.stride or constant.shape),
        ctypes.c_int64(constant.storage_offset),
        getattr(torch_c, f"aoti_torch_dtype_{constant.dtype}")(),
        getattr(torch_c, f"aoti_torch_device_type_{device.type}")(),
        device.index or 0,
        ctypes.byref(handle),
        layout(),
        constant.packing,
        ctypes.c_int64(len(constant.packing)),
    )
    if failed:
        raise LibraryError(f"the constant {constant.name} of a library cannot be made a tensor")
    return cast(Tensor, _tensors_of([_new_capsule(handle, None, None)])[0])


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
