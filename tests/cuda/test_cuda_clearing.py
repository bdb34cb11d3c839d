"""Memset nodes of CUDA graphs that kernels replace: the same bytes are cleared, at the same moment, and no others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aotc.machine.cuda_capture import capturing
from aotc.runtime.cuda import memset_nodes
from aotc.runtime.cuda.driver import ask
from aotc.runtime.cuda.memset_nodes import LARGEST, clear_by_kernels

pytestmark = pytest.mark.cuda

BYTES = 4 * LARGEST


@pytest.fixture
def memory() -> Iterator[Tensor]:
    """Bytes that are all 7, on a stream that can be captured."""
    memory = torch.full((BYTES,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield memory
    torch.cuda.synchronize()


def memset(memory: Tensor, begin: int, count: int, value: int = 0) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    address = ctypes.c_uint64(memory.data_ptr() + begin)
    ask("cuMemsetD8Async", address, ctypes.c_ubyte(value), ctypes.c_size_t(count), stream)


def recorded(work: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of that work, and how many of its memset nodes kernels have replaced."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, torch.cuda.graph_pool_handle()):
        work()
    count = clear_by_kernels(graph)
    graph.instantiate()
    return graph, count


def memsets(graph: torch.cuda.CUDAGraph) -> int:
    return len(list(memset_nodes._Graph(graph).memsets()))


@pytest.mark.parametrize(
    ("begin", "count"), [(0, 4), (16, 64), (1, 3), (5, 1), (8, 4096), (32, LARGEST), (3, LARGEST - 1)]
)
def test_a_kernel_clears_just_what_a_memset_would(memory: Tensor, begin: int, count: int) -> None:
    graph, replaced = recorded(lambda: memset(memory, begin, count))
    assert (replaced, memsets(graph)) == (1, 0)
    torch.cuda.synchronize()
    assert (memory == 7).all(), "nothing is cleared before the graph is launched"
    graph.replay()
    torch.cuda.synchronize()
    assert (memory[begin : begin + count] == 0).all()
    assert (memory[:begin] == 7).all() and (memory[begin + count :] == 7).all()


def test_it_is_done_after_what_came_before_and_before_what_comes_after(memory: Tensor) -> None:
    seen = torch.zeros(8, dtype=torch.uint8, device="cuda")

    def work() -> None:
        for index in range(0, 8, 2):
            memory.add_(1)
            seen[index].copy_(memory[index])
            memset(memory, 0, 64)
            seen[index + 1].copy_(memory[index + 1])

    graph, replaced = recorded(work)
    assert (replaced, memsets(graph)) == (4, 0)
    for _ in range(100):
        seen.fill_(9)
        graph.replay()
        torch.cuda.synchronize()
        assert seen.tolist()[1:] == [0, 1, 0, 1, 0, 1, 0]
        assert (memory[:64] == 0).all()


@pytest.mark.parametrize(("begin", "count", "value"), [(0, LARGEST + 1, 0), (0, 64, 3)])
def test_what_is_large_or_not_zero_stays_a_memset(memory: Tensor, begin: int, count: int, value: int) -> None:
    graph, replaced = recorded(lambda: memset(memory, begin, count, value))
    assert (replaced, memsets(graph)) == (0, 1)
    graph.replay()
    torch.cuda.synchronize()
    assert (memory[begin : begin + count] == value).all()


@pytest.mark.parametrize("refused", ["cuGraphAddKernelNode_v2", "cuGraphAddDependencies_v2", "cuGraphGetNodes"])
def test_where_the_driver_refuses_the_graph_is_as_it_was(
    memory: Tensor, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(function: str, *arguments: object) -> None:
        if function == refused:
            raise RuntimeError(f"{function}: CUresult 801")
        ask(function, *arguments)

    def work() -> None:
        memory.add_(1)
        memset(memory, 0, 64)
        memory.add_(1)

    with monkeypatch.context() as patched:
        patched.setattr(memset_nodes, "ask", refusing)
        graph, replaced = recorded(work)
    assert (replaced, memsets(graph)) == (0, 1)
    graph.replay()
    torch.cuda.synchronize()
    assert (memory[:64] == 1).all() and (memory[64:] == 9).all()


def test_an_attention_of_cudnn_is_recorded_without_a_memset(memory: Tensor) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 128, 64, device="cuda", generator=generator).bfloat16().unbind()

    def attention() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    try:
        expected = attention()
    except RuntimeError:
        pytest.skip("this GPU has no attention of cuDNN's")
    results: list[Tensor] = []
    unchanged = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(unchanged, torch.cuda.graph_pool_handle()):
        attention()
    if not memsets(unchanged):
        pytest.skip("this version of cuDNN clears nothing")
    graph, replaced = recorded(lambda: results.append(attention()))
    assert (replaced, memsets(graph)) == (memsets(unchanged), 0)
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(results[0], expected)
