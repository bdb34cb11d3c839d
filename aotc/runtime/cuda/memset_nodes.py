"""Replaces memset nodes of a CUDA graph by fill kernels.

A graph of nothing but kernels, one after the other, is given to the GPU at once. A memset node in between is launched
by itself, and the GPU waits 5 µs around it (H200, driver 580). cuDNN's attention clears a counter before each call:
without these nodes a GPT of 12 layers takes 0.574 ms instead of 0.595, and its launch 5 µs of the host instead of 20.

Source: CUDA Driver API, "Graph Management"; the structures are those of cuda.h.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aotc.machine.cuda_capture import capturing
from aotc.runtime.cuda.driver import ask

LARGEST = 1 << 16
"""Bytes: what is larger takes longer than the wait."""

_MEMSET_NODE = 2
_VECTOR = 16
"""Bytes that a kernel writes at once where the address allows it; if not, it is another kernel."""

_log = logging.getLogger("aotc")


def clear_by_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Replace the memset nodes of a graph that is not yet instantiated by kernels. Returns their number.

    Called with the stream of the capture as the current one. What is large, or set to anything but zero, stays; and so
    does the rest where this driver refuses: a graph computes the same either way.
    """
    count, fill = 0, functools.cache(_Fill)
    try:
        whole = _Graph(graph)
        for node in whole.memsets():
            if zeros := _small_zeros(node):
                whole.replace(node, fill(*zeros).kernel)
                count += 1
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        _log.debug("CUDA graph: memory is cleared by memset nodes: %s", error)
    return count


class _Memset(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid_and_block", ctypes.c_uint * 6),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


_Edge = ctypes.c_ubyte * 8
"""All zero: after the other node has ended."""


class _Graph:
    """A `CUgraph`, whose nodes are `CUgraphNode` handles."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._handle = ctypes.c_void_p(graph.raw_cuda_graph())

    def nodes(self) -> list[ctypes.c_void_p]:
        return _all(functools.partial(ask, "cuGraphGetNodes", self._handle))

    def memsets(self) -> Iterator[ctypes.c_void_p]:
        for node in self.nodes():
            kind = ctypes.c_int()
            ask("cuGraphNodeGetType", node, ctypes.byref(kind))
            if kind.value == _MEMSET_NODE:
                yield node

    def replace(self, node: ctypes.c_void_p, kernel: _Kernel) -> None:
        """Replace a node by a kernel with the same predecessors and successors."""
        before = _all(functools.partial(_only_plain, "cuGraphNodeGetDependencies_v2", node))
        after = _all(functools.partial(_only_plain, "cuGraphNodeGetDependentNodes_v2", node))
        new = ctypes.c_void_p()
        ask(
            "cuGraphAddKernelNode_v2",
            ctypes.byref(new),
            self._handle,
            _array(before),
            ctypes.c_size_t(len(before)),
            ctypes.byref(kernel),
        )
        try:
            edges = (_Edge * len(after))()
            sources, count = _array([new] * len(after)), ctypes.c_size_t(len(after))
            ask("cuGraphAddDependencies_v2", self._handle, sources, _array(after), edges, count)
        except RuntimeError:
            ask("cuGraphDestroyNode", new)
            raise
        ask("cuGraphDestroyNode", node)


def _all(list_into: Callable[[Any, Any], None]) -> list[ctypes.c_void_p]:
    """A list from the driver, whose length is asked for first."""
    count = ctypes.c_size_t()
    list_into(None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        list_into(nodes, ctypes.byref(count))
    return [ctypes.c_void_p(node) for node in nodes]


def _only_plain(function: str, node: ctypes.c_void_p, nodes: Any, count: Any) -> None:
    """Ask for a node's neighbours. Raises RuntimeError where one waits for less than the end of the other."""
    edges = (_Edge * len(nodes))() if nodes is not None else None
    ask(function, node, nodes, edges, count)
    if edges is not None and any(bytes(edges)):
        raise RuntimeError("a memset node with a programmatic dependency")


def _array(nodes: list[ctypes.c_void_p]) -> Any:
    return (ctypes.c_void_p * len(nodes))(*nodes)


def _small_zeros(node: ctypes.c_void_p) -> tuple[int, int] | None:
    """The address and the number of bytes that a node sets to zero, if they are few and contiguous."""
    memset = _Memset()
    ask("cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
    count = memset.width * memset.element_bytes
    return (memset.address, count) if memset.height == 1 and not memset.value and 0 < count <= LARGEST else None


class _Fill:
    """torch's kernel that fills these bytes with zeros, as it is launched for them.

    It is recorded and never launched: others may be using what lies there.
    """

    def __init__(self, address: int, count: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        _load_fill(count, address % _VECTOR, device)
        storage = torch._C._construct_storage_from_data_pointer(address, device, count)
        target = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # holds the values of the kernel's parameters
        with capturing(self._graph, torch.cuda.graph_pool_handle()):
            target.fill_(0)
        (node,) = _Graph(self._graph).nodes()
        self.kernel = _Kernel()
        ask("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(self.kernel))


@functools.cache
def _load_fill(count: int, offset: int, device: torch.device) -> None:
    """Have CUDA load the kernel, which it does at a first launch and not during a capture."""
    memory = torch.empty(count + _VECTOR, dtype=torch.uint8, device=device)  # begins at a multiple of 512
    memory[offset : offset + count].fill_(0)
