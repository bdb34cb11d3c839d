"""How autotuning times a candidate on a GPU: with nobody else on it, and whatever the host's pace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from aotc.quiet import device_alone

HEAD_START = 200_000
"""Cycles that the GPU sleeps before each timed launch, about 0.1 ms: longer than the host takes to queue it."""


@contextmanager
def timed_fairly() -> Iterator[None]:
    """Time every candidate in this context on its device work alone.

    Each benchmark has the GPU to itself: timings disturbed by another unit's are random picks. And each launch is
    queued before its clock starts: a library call takes the host longer than a Triton kernel does, and on a busy
    machine longer than the GPU, so it would lose races that it wins in a CUDA graph.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    timer: Any = type(benchmarker)
    changed = {name: _alone(getattr(timer, name)) for name in dir(timer) if name.startswith("benchmark_gpu")}
    if hasattr(timer, "get_event_pairs"):
        changed["get_event_pairs"] = _with_head_start(timer.get_event_pairs)
    with ExitStack() as patches:
        for name, function in changed.items():
            patches.enter_context(mock.patch.object(timer, name, function))
        yield


def _alone(benchmark: Callable[..., Any]) -> Callable[..., Any]:
    def alone(*args: Any, **kwargs: Any) -> Any:
        with device_alone(f"cuda:{torch.cuda.current_device()}"):
            return benchmark(*args, **kwargs)

    return alone


class _LateEvent:
    """A CUDA event that is recorded after a sleep of the GPU."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self.elapsed_time = event.elapsed_time

    def record(self) -> None:
        torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        self._event.record()


def _with_head_start(get_event_pairs: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any, **kwargs: Any) -> Any:
        return [(_LateEvent(start), end) for start, end in get_event_pairs(*args, **kwargs)]

    return late
