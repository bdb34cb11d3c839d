"""Weights to a GPU through small buffers: every byte arrives, and no buffer is filled before it has been read.

The lanes here deliver late, to places on the host; `cuda/test_cuda_weights.py` has those of a GPU.
"""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from torch import Tensor

from aotc.runtime.checkpoints import staged
from aotc.runtime.checkpoints.staged import can_be_staged, copy_by


class LateLane:
    """Reads a buffer only when its owner waits for it, as the slowest device would."""

    def __init__(self, size: int) -> None:
        self._memory = [ctypes.create_string_buffer(size) for _ in range(2)]
        self.buffers = [ctypes.addressof(each) for each in self._memory]
        self._sent: dict[int, Tensor] = {}
        self.threads: set[int] = set()
        self.sizes: list[int] = []

    def wait(self, slot: int) -> None:
        if (place := self._sent.pop(slot, None)) is not None:
            ctypes.memmove(place.data_ptr(), self.buffers[slot], place.numel())

    def send(self, slot: int, place: Tensor) -> None:
        assert slot not in self._sent
        self._sent[slot] = place
        self.sizes.append(place.numel())
        self.threads.add(threading.get_ident())

    def finish(self) -> None:
        for slot in list(self._sent):
            self.wait(slot)


@pytest.fixture(params=[1, 3])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[LateLane]:
    monkeypatch.setattr(staged, "CHUNK", 64)
    return [LateLane(64) for _ in range(request.param)]


def test_tensors_of_all_sizes_and_layouts_arrive(lanes: list[LateLane]) -> None:
    sources = [
        torch.randn(100, 7),
        torch.randn(16, dtype=torch.bfloat16),  # half a chunk
        torch.randn(8, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(17, dtype=torch.int8)[1:],  # at an odd address
        torch.randn(()),
        torch.empty(0, 5),
    ]
    copies = [(torch.empty_strided(each.shape, each.stride(), dtype=each.dtype), each) for each in sources]
    assert all(can_be_staged(*copy) for copy in copies)
    copy_by(lanes, copies)
    assert all(torch.equal(placed, source) for placed, source in copies)
    sizes = [size for lane in lanes for size in lane.sizes]
    assert sum(sizes) == sum(each.nbytes for each in sources) and max(sizes) == 64
    assert all(len(lane.threads) <= 1 for lane in lanes)


def test_a_place_within_a_larger_tensor_is_all_that_is_written(lanes: list[LateLane]) -> None:
    whole, source = torch.zeros(100), torch.randn(40)
    copy_by(lanes, [(whole[30:70], source)])
    assert torch.equal(whole[30:70], source) and not whole[:30].any() and not whole[70:].any()


def test_a_lane_that_fails_is_an_error(lanes: list[LateLane], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(slot: int, place: Tensor) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lanes[-1], "send", refuse)
    with pytest.raises(RuntimeError, match="out of memory"):
        copy_by(lanes[-1:], [(torch.empty(100), torch.randn(100))])


@pytest.mark.parametrize(
    ("placed", "source"),
    [
        (torch.empty(4, 4), torch.randn(4, 4).t()),
        (torch.empty(4, 4), torch.randn(4, 8)[:, :4]),
        (torch.empty_strided((4, 4), (8, 1)), torch.randn(4, 4)),
        (torch.empty(4), torch.randn(1).expand(4)),
        (torch.empty(4), torch.randn(4, dtype=torch.float64)),
        (torch.empty(4, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64).conj()),
    ],
    ids=["transposed", "a slice", "with gaps", "repeated", "another dtype", "conjugated"],
)
def test_what_is_not_the_same_run_of_bytes_is_copied_otherwise(placed: Tensor, source: Tensor) -> None:
    assert not can_be_staged(placed, source)


def test_little_is_left_to_a_plain_copy() -> None:
    copies = [(torch.empty(4), torch.randn(4))]
    assert staged.copy_to_gpu(copies, torch.device("cuda:0")) == copies
