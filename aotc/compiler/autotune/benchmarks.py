"""Autotuning's benchmarks: each alone on its device, and on a GPU of the kernels themselves.

Inductor times what happens between two events on a stream. Where Python launches a kernel more slowly than the GPU runs
it, the GPU waits in between, and the wait is timed, too: 57 µs for a kernel of 8 µs (torch 2.11, H200). Then chance
decides between small kernels, and one slow kernel beats two fast ones. Here each benchmark is captured as a CUDA graph,
with the events inside, and replayed.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from unittest import mock

import torch

from aotc.machine.benchmarking import device_alone
from aotc.machine.cuda_capture import capturing
from aotc.provenance import WIDE

CALLS = 10
"""In one graph."""
REPLAYS = 10
LONGEST_MS = 25.0
"""After which no further replay begins: as long as Inductor times a candidate."""

Call = Callable[[], Any]


@contextmanager
def cpu_benchmarks_alone() -> Iterator[None]:
    """While this context lasts, no other unit of this user runs on this machine during a benchmark on the CPU, and what
    else runs adds nothing to the time: Inductor takes the median, which was 12 ms for a kernel of 0.04 ms where others'
    threads held one of two cores."""
    from torch._inductor.runtime.benchmarking import Benchmarker

    def alone(self: Any, call: Call, warmup: int = 20, rep: int = 100) -> float:
        with device_alone("cpu"):
            return least_milliseconds(call, warmup, rep)

    with mock.patch.object(Benchmarker, "benchmark_cpu", alone):
        yield


class Measured(float):
    """The least of some calls' times in milliseconds, a number to Inductor, which brings it to the picker as it is."""

    def __new__(cls, times: Sequence[float]) -> Self:
        return super().__new__(cls, min(times))

    def __init__(self, times: Sequence[float]) -> None:
        self._times = tuple(times)
        self.median = statistics.median(times)
        self.calls = len(times)

    def __reduce__(self) -> tuple[Any, ...]:
        return Measured, (self._times,)

    @property
    def is_wide(self) -> bool:
        return self.median > WIDE * self


def least_milliseconds(call: Call, warmup: float, rep: float) -> Measured:
    """The least time of a call, among those that begin within `rep` ms after `warmup` ms; within five times as many
    where half of them took much longer than the least."""
    _times(call, warmup)
    times = _times(call, rep)
    if Measured(times).is_wide:
        times += _times(call, 4 * rep)
    return Measured(times)


def _times(call: Call, duration: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + duration / 1e3
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return times


@contextmanager
def gpu_benchmarks_alone() -> Iterator[None]:
    """Let each benchmark of autotuning have the GPU to itself: timings disturbed by another unit's are random picks."""
    from torch._inductor.runtime.benchmarking import benchmarker

    timer: Any = type(benchmarker)
    torch.cuda.synchronize()
    with ExitStack() as patches:
        # Inductor looks up the stream before it times, and the default one cannot be captured.
        patches.enter_context(torch.cuda.stream(torch.cuda.Stream()))  # type: ignore[no-untyped-call]
        patches.callback(torch.cuda.synchronize)
        for name in (name for name in dir(timer) if name.startswith("benchmark_gpu")):
            patches.enter_context(mock.patch.object(timer, name, _alone(getattr(timer, name))))
        yield


def _alone(benchmark: Callable[..., Any]) -> Callable[..., Any]:
    def alone(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
        with device_alone(f"cuda:{torch.cuda.current_device()}"):
            if "return_mode" in kwargs or "grad_to_none" in kwargs or (ms := _replayed(call)) is None:
                return benchmark(self, call, *args, **kwargs)
            return ms

    return alone


def _replayed(call: Call) -> Measured | None:
    try:
        return milliseconds(call)
    except Exception:  # whether that is an error or a candidate without a time, Inductor's benchmark says
        return None


def milliseconds(call: Call) -> Measured | None:
    """The least time of what `call` launches on the current stream, with nothing in the L2 cache; None where no graph
    can hold it.

    Raises what `call` raises.
    """
    call()  # compiles, loads, and fails where it must
    torch.cuda.synchronize()
    cache = torch.empty(_l2_bytes(), dtype=torch.int8, device="cuda")
    spans = [(_event(), _event()) for _ in range(CALLS)]
    graph = torch.cuda.CUDAGraph()
    try:
        with capturing(graph, _memory(torch.cuda.current_device()).pool):
            for begin, end in spans:
                cache.zero_()
                begin.record()
                call()
                end.record()
    except RuntimeError:  # it waits for the GPU, or has a stream of its own
        _memory.cache_clear()  # torch 2.11 takes no further graph into the pool of one that failed
        return None
    times: list[float] = []
    for _ in range(REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end) for begin, end in spans]
        if sum(times) > LONGEST_MS:
            break
    graph.reset()
    return Measured(times)


class _Memory:
    """The pool of all these graphs, of which no two are ever alive together; torch gives it up with its last graph, so
    one that does nothing stays."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.graph = torch.cuda.CUDAGraph()
        written = torch.empty(1, device="cuda")
        with capturing(self.graph, self.pool):
            written.zero_()


@functools.cache
def _memory(device: int) -> _Memory:
    with torch.cuda.device(device):
        return _Memory()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]


def _l2_bytes() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
