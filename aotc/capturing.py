"""Recording a CUDA graph, in a process that goes on well whether or not it can be recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record what is launched on the current stream, which is not the default one, with memory of `pool`.

    Unlike `torch.cuda.graph`, this neither synchronises the device nor empties the allocator's cache, which would cost
    milliseconds for each of many buckets; and what other threads do meanwhile (allocate, say) does not disturb it.

    torch keeps a cuBLAS workspace for each stream and frees them all when anybody asks for it, as `torch.compile` does
    for its CUDA graphs; a graph that holds the address of one would go on writing there. So none is kept here, and the
    capture takes its own from the graphs' pool, where nothing else ever lies.

    Raises RuntimeError where what is launched cannot be recorded: it waits for the GPU, say.
    """
    torch._C._cuda_clearCublasWorkspaces()
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        yield
        graph.capture_end()
    except BaseException:
        with suppress(RuntimeError):
            graph.capture_end()
        _clean_up(pool)
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _clean_up(pool: Any) -> None:
    """Undo what torch (2.11) leaves of a capture that failed: its allocator still serves the pool, and its random
    generator waits for the end of the capture, so that `torch.randn` raises on this device."""
    device: Any = torch.cuda.current_device()
    with suppress(RuntimeError):  # it is not recorded any more: then there is nothing to undo
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    written = torch.empty(1, device="cuda")
    well = torch.cuda.CUDAGraph()
    well.capture_begin(capture_error_mode="thread_local")
    written.zero_()
    well.capture_end()  # which ends it for the generator
    well.reset()
