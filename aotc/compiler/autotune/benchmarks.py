"""Autotuning's benchmarks: each alone on its device; on a GPU without the launch overhead.

Inductor measures the time between two events on a stream. If Python launches a kernel more slowly than the GPU runs it,
the GPU's wait is part of the time: 57 µs for a kernel of 8 µs (torch 2.11, H200). Then the choice between small kernels
is random, and one slow kernel beats two fast ones. Here each benchmark is captured as a CUDA graph, with the events
inside, and replayed.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch

from aotc.compiler.scoped import replaced
from aotc.machine.benchmarking import device_alone
from aotc.machine.cuda_capture import capturing
from aotc.provenance import WIDE

CALLS = 10
"""The number of calls in one graph."""
REPLAYS = 10
LONGEST_MS = 25.0
"""The time after which no further replay begins: as long as Inductor times a candidate."""

BenchmarkedCall = Callable[[], Any]


@contextmanager
def cpu_benchmarks_alone() -> Iterator[None]:
    """While active, this user's other units on this machine are stopped during a CPU benchmark, and the result is the
    minimum, to which other programs add nothing. Inductor takes the median, which was 12 ms for a kernel of 0.04 ms
    when other threads held one of two cores."""
    from torch._inductor.runtime.benchmarking import Benchmarker

    def alone(self: Any, call: BenchmarkedCall, warmup: int = 20, rep: int = 100) -> float:
        with device_alone("cpu"):
            return least_milliseconds(call, warmup, rep)

    with replaced(Benchmarker, "benchmark_cpu", alone):
        yield


class MeasuredTime(float):
    """The minimum of some calls' times in milliseconds: a float, which Inductor passes to the picker unchanged."""

    def __new__(cls, times: Sequence[float]) -> Self:
        return super().__new__(cls, min(times))

    def __init__(self, times: Sequence[float]) -> None:
        self._times = tuple(times)
        self.median = statistics.median(times)
        self.calls = len(times)

    def __reduce__(self) -> tuple[Any, ...]:
        return MeasuredTime, (self._times,)

    @property
    def is_wide(self) -> bool:
        return self.median > WIDE * self


def least_milliseconds(call: BenchmarkedCall, warmup: float, rep: float) -> MeasuredTime:
    """The minimum time of the calls that begin within `rep` ms, after `warmup` ms; within five times `rep` if the
    median is much higher than the minimum."""
    _times(call, warmup)
    times = _times(call, rep)
    if MeasuredTime(times).is_wide:
        times += _times(call, 4 * rep)
    return MeasuredTime(times)


def _times(call: BenchmarkedCall, duration: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + duration / 1e3
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return times


@contextmanager
def gpu_benchmarks_alone() -> Iterator[None]:
    """While active, each benchmark has the GPU to itself: timings disturbed by another unit would give random picks."""
    from torch._inductor.runtime.benchmarking import benchmarker

    timer: Any = type(benchmarker)
    torch.cuda.synchronize()
    with ExitStack() as patches:
        # Inductor looks up the stream before it times, and the default one cannot be captured.
        patches.enter_context(torch.cuda.stream(torch.cuda.Stream()))  # type: ignore[no-untyped-call]
        patches.callback(torch.cuda.synchronize)
        for name in (name for name in dir(timer) if name.startswith("benchmark_gpu")):
            patches.enter_context(replaced(timer, name, _alone(getattr(timer, name))))
        yield


def _alone(benchmark: Callable[..., Any]) -> Callable[..., Any]:
    def alone(self: Any, call: BenchmarkedCall, *args: Any, **kwargs: Any) -> Any:
        with device_alone(f"cuda:{torch.cuda.current_device()}"):
            if "return_mode" in kwargs or "grad_to_none" in kwargs or (ms := _replayed(call)) is None:
                return benchmark(self, call, *args, **kwargs)
            return ms

    return alone


def _replayed(call: BenchmarkedCall) -> MeasuredTime | None:
    try:
        return milliseconds(call)
    except Exception:  # Inductor's own benchmark then raises the error, or times the candidate
        return None


def milliseconds(call: BenchmarkedCall) -> MeasuredTime | None:
    """The minimum time of the work that `call` launches on the current stream, with a cold L2 cache; None where it
    cannot be captured as a CUDA graph. Exceptions of `call` pass through.
    """
    call()  # compile, load, and raise errors before the capture
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
    except RuntimeError:  # `call` waits for the GPU, or uses a stream of its own
        _memory.cache_clear()  # torch 2.11 cannot capture into a pool after a failed capture
        return None
    times: list[float] = []
    for _ in range(REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end) for begin, end in spans]
        if sum(times) > LONGEST_MS:
            break
    graph.reset()
    return MeasuredTime(times)


class _Memory:
    """The memory pool of all these graphs, of which only one exists at a time. torch frees a pool with its last graph,
    so a graph that does nothing is kept."""

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
