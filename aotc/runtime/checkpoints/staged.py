"""Copies from the host to a GPU at the speed of the bus: by threads, each through two small pinned buffers.

A GPU reads pageable memory through buffers of the driver, 7 GB/s, and pinned memory at 55. To pin as much memory as a
model has takes longer than that saves, so a few buffers are pinned and filled in turn: while one is on its way, the
thread fills the other one (`tests/benchmarks/weights_to_gpu.py` measures it). `LANES` × 2 × `CHUNK` bytes of pinned
memory are held meanwhile, whatever the model's size; torch keeps them for its next pinned tensors.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CHUNK = 4 << 20
LANES = 8
SMALL = 640 << 20
"""Bytes below which the buffers cost more than they save: to pin them takes 40 ms once."""

Copy = tuple[Tensor, Tensor]
"""To where, from where."""
_log = logging.getLogger("aotc")


class Chunk(NamedTuple):
    """Bytes on the host from this address on, and their place."""

    source: int
    place: Tensor


class Lane(Protocol):
    """Two buffers of CHUNK bytes on the way to a device. One thread uses it."""

    buffers: Sequence[int]
    """Their addresses."""

    def wait(self, slot: int) -> None:
        """Return when the buffer may be filled again."""
        ...

    def send(self, slot: int, place: Tensor) -> None:
        """Begin to copy the first bytes of the buffer to their place."""
        ...

    def finish(self) -> None:
        """Return when all has arrived."""
        ...


class CudaLane:
    """On a stream of its own, after what the stream `here` did before: it may have used that memory."""

    def __init__(self, device: torch.device, here: torch.cuda.Stream) -> None:
        """Raises RuntimeError where no memory can be pinned."""
        self._pinned = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.buffers: Sequence[int] = [each.data_ptr() for each in self._pinned]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(here)
        self._left = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]

    def wait(self, slot: int) -> None:
        self._left[slot].synchronize()

    def send(self, slot: int, place: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            place.copy_(self._pinned[slot][: place.numel()], non_blocking=True)
            self._left[slot].record()

    def finish(self) -> None:
        self._stream.synchronize()


def copy_to_gpu(copies: Sequence[Copy], device: torch.device) -> list[Copy]:
    """Copy the tensors that gain by it, and return the rest: small ones, ones on a GPU, ones with other strides."""
    chosen = [copy for copy in copies if can_be_staged(*copy)]
    if sum(tensor.nbytes for _, tensor in chosen) < SMALL:
        return list(copies)
    here = torch.cuda.current_stream(device)
    try:
        with torch.cuda.device(device):  # in whose context memory is pinned
            lanes = [CudaLane(device, here) for _ in range(min(LANES, len(os.sched_getaffinity(0))))]
    except RuntimeError as error:  # a limit on locked memory
        _log.info("no memory can be pinned, so weights are copied more slowly: %s", error)
        return list(copies)
    copy_by(lanes, chosen)
    staged = {id(placed) for placed, _ in chosen}
    return [copy for copy in copies if id(copy[0]) not in staged]


def can_be_staged(placed: Tensor, tensor: Tensor) -> bool:
    """Whether both are one run of bytes, in the same order, and the source is on the host."""
    strides = placed.stride()
    order = sorted(range(placed.dim()), key=lambda axis: -strides[axis])
    return (
        tensor.device.type == "cpu"
        and placed.dtype is tensor.dtype
        and placed.shape == tensor.shape
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_pinned())
        and placed.permute(order).is_contiguous()
        and tensor.permute(order).is_contiguous()
    )


def copy_by(lanes: Sequence[Lane], copies: Sequence[Copy]) -> None:
    """Copy by as many threads as there are lanes, each of which takes the next chunk when it is free."""
    chunks: SimpleQueue[Chunk] = SimpleQueue()
    for placed, tensor in copies:
        for chunk in _chunks(placed, tensor):
            chunks.put(chunk)
    with ThreadPoolExecutor(len(lanes), "aotc.weights") as pool:
        list(pool.map(_drive, lanes, [chunks.get_nowait] * len(lanes)))


def _drive(lane: Lane, take: Callable[[], Chunk]) -> None:
    slot = 0
    try:
        while True:
            chunk = take()
            lane.wait(slot)
            ctypes.memmove(lane.buffers[slot], chunk.source, chunk.place.numel())  # without Python's lock
            lane.send(slot, chunk.place)
            slot = 1 - slot
    except Empty:
        pass
    finally:
        lane.finish()


def _chunks(placed: Tensor, tensor: Tensor) -> Iterator[Chunk]:
    size = tensor.nbytes
    with torch.inference_mode(False):
        place = torch.empty(0, dtype=torch.uint8, device=placed.device).set_(
            placed.untyped_storage(), placed.storage_offset() * placed.element_size(), (size,), (1,)
        )
    for start in range(0, size, CHUNK):
        yield Chunk(tensor.data_ptr() + start, place[start : start + CHUNK])
