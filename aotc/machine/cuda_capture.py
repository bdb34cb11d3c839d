"""Record a CUDA graph, so that a failed recording leaves the process in a sound state."""

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

    torch keeps a cuBLAS workspace for each stream and frees them all on request, as `torch.compile` does
    for its CUDA graphs; a graph that holds the address of one would go on writing there. So none is kept here, and the
    capture takes its own from the graphs' pool, where nothing else ever lies.

    Raises RuntimeError where what is launched cannot be recorded: it waits for the GPU, say. torch (2.11) then takes no
    further graph into this pool.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        yield
        graph.capture_end()
    except BaseException:
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        with suppress(RuntimeError):
            _end_for_generator()
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _end_for_generator() -> None:
    """Tell torch's random generator that the capture has ended.

    Of a capture that failed it is not told (torch 2.11), and `torch.randn` then raises; of one that succeeds it is.
    """
    written = torch.empty(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    written.zero_()
    graph.capture_end()


def is_captured(device: torch.device) -> bool:
    """Whether what this thread launches on a GPU now is recorded into a CUDA graph, as within `torch.cuda.graph`."""
    if torch._C._cuda_getDevice() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
