"""Dummy weights: parameters that cost a build neither time nor memory, whatever their size.

Live weights are arguments of the compiled code, so a build needs their forms and not their values. While the factory
runs, every parameter that a module registers moves to the meta device, where initialisation does nothing. The build's
checks do run the model, so the parameters are then filled with random numbers: of a large one, every part is the same
block of memory, mapped again and again. Buffers are not touched: the angles of a rotary embedding keep their values.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook

PAGES = 2049
"""The size of a block. An odd number: the parts of one weight for queries, keys and values, whose sizes are powers of
two, then differ."""

WIDEST_KERNEL = 128
"""Elements; a parameter of three axes of which the last is longer is taken for several matrices."""

BLOCK = PAGES * mmap.PAGESIZE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # of Linux on x86-64 and aarch64, which Python's mmap does not name


# -- while the factory runs -------------------------------------------------------------------------------------------


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While active, plain parameters move to the meta device when a module registers them.

    Tied parameters stay tied, and parameters that share memory share it. Parameters of a tensor subclass, or of a GPU,
    are left alone.
    """
    moved = _Moved()
    hook: Any = moved.registered
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class _Moved:
    """The parameters that were moved, by the parameters and storages in whose places they are."""

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
        self._storages: dict[int, tuple[StorageWeakRef, Any]] = {}

    def registered(self, _module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """The parameter to register instead; None to leave it."""
        if type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
            return None
        known, instead = self._parameters.get(id(parameter), (None, None))
        if instead is None or known is None or known() is not parameter:
            data = torch.empty(0, dtype=parameter.dtype, device="meta").set_(
                self._storage(parameter), parameter.storage_offset(), parameter.shape, parameter.stride()
            )
            instead = nn.Parameter(data, parameter.requires_grad)
            vars(instead).update(vars(parameter))
            self._parameters[id(parameter)] = weakref.ref(parameter), instead
        return instead

    def _storage(self, parameter: nn.Parameter) -> Any:
        storage = parameter.untyped_storage()
        known, instead = self._storages.get(storage._cdata, (None, None))
        if known is None or known.expired():  # type: ignore[no-untyped-call]
            instead = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage), instead  # type: ignore[no-untyped-call]
        return instead


# -- afterwards -------------------------------------------------------------------------------------------------------


def fill(module: nn.Module) -> None:
    """Give the parameters on the meta device random values in the CPU's memory, the same in every process.

    The values keep numbers in a usual range: those of a matrix have the deviation 1 / √(inputs), other parameters are
    near 1, and biases near 0. Parameters that share memory share it.
    """
    filled: dict[int, Any] = {}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if parameter.is_meta:
            storage = parameter.untyped_storage()
            if storage._cdata not in filled:
                filled[storage._cdata] = _values(name, parameter, storage.nbytes(), number)
            data = torch.empty(0, dtype=parameter.dtype).set_(
                filled[storage._cdata], parameter.storage_offset(), parameter.shape, parameter.stride()
            )
            _become(module, parameter, nn.Parameter(data, parameter.requires_grad))


def _become(module: nn.Module, parameter: nn.Parameter, filled: nn.Parameter) -> None:
    """Give the parameter the memory of `filled`, for all that refer to it. Where torch refuses that (an LSTM has weak
    references to its weights), the module's parts get `filled` in its place."""
    vars(filled).update(vars(parameter))
    try:
        torch.utils.swap_tensors(parameter, filled)  # type: ignore[no-untyped-call]
    except RuntimeError:
        for part in module.modules():
            for name in [name for name, value in part._parameters.items() if value is parameter]:
                setattr(part, name, filled)


def _values(name: str, parameter: Tensor, size: int, number: int) -> Any:
    """A storage of `size` bytes for the parameter, which is the module's `number`-th: its values begin at another place
    of the block than those of the others."""
    if parameter.dim() > 1:
        form = 0.0, 2.0 ** (-round(math.log2(_inputs(parameter.shape))) / 2)
    else:
        form = float(not name.endswith("bias")), 1 / 64
    block = _block(parameter.dtype, *form)
    first = 257 * number % PAGES
    if size >= BLOCK:
        return _mapped(block, size, first).untyped_storage()
    data = torch.empty(size, dtype=torch.uint8)
    begin = min(first * mmap.PAGESIZE, BLOCK - size)
    return data.copy_(_bytes(block, BLOCK)[begin : begin + size]).untyped_storage()


def _inputs(shape: Sequence[int]) -> int:
    """How many products an output sums up, for a matrix, a convolution, several matrices, or an embedding."""
    if shape[0] == 1 or (len(shape) == 3 and shape[2] > WIDEST_KERNEL):
        return max(1, *shape[1:])
    return max(1, math.prod(shape[1:]))


@functools.cache
def _block(dtype: torch.dtype, mean: float, deviation: float) -> int:
    """The descriptor of a file in memory with random numbers."""
    descriptor = os.memfd_create("aotc-dummy-weights")
    os.ftruncate(descriptor, BLOCK)
    data = _bytes(descriptor, BLOCK, mmap.MAP_SHARED).view(dtype)
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point or dtype.is_complex:
        wide = dtype if dtype.is_complex or dtype.itemsize > 1 else torch.float32
        data.copy_(torch.randn(data.shape, generator=generator, dtype=wide) * deviation + mean)
    else:  # perhaps indices: 0 and 1 are in most ranges
        data.copy_(torch.randint(0, 2, data.shape, generator=generator))
    return descriptor


def _bytes(descriptor: int, size: int, flags: int = mmap.MAP_PRIVATE) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size, flags=flags), dtype=torch.uint8)


def _mapped(block: int, size: int, first: int) -> Tensor:
    """`size` bytes that begin at page `first` of the block and repeat it. Writes are private. They stay mapped until
    the process ends, which holds no more memory for them than the block's."""
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    address = _map(None, whole, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    done, offset = 0, first * mmap.PAGESIZE
    while done < whole:
        part = min(BLOCK - offset, whole - done)
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        _map(address + done, part, mmap.PROT_READ | mmap.PROT_WRITE, flags, block, offset)
        done, offset = done + part, 0
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


@functools.cache
def _mmap() -> Any:
    """The C library's `mmap`: Python's cannot map at a given address."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    return function


def _map(address: int | None, size: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    mapped = _mmap()(address, size, protection, flags | _MAP_NORESERVE, descriptor, offset)
    if mapped == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"memory cannot be mapped for dummy weights: {os.strerror(number)}")
    return int(mapped)
