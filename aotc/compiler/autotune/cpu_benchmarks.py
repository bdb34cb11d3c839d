"""Inductor's benchmarks on the CPU, each with the machine's cores to itself as far as builds go."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from aotc.machine.benchmarking import device_alone


@contextmanager
def cpu_benchmarks_alone() -> Iterator[None]:
    """While this context lasts, no other unit of this user runs on this machine during a benchmark on the CPU."""
    from torch._inductor.runtime import benchmarking

    timer: Any = benchmarking.Benchmarker
    benchmark = timer.benchmark_cpu

    @functools.wraps(benchmark)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with device_alone("cpu"):
            return benchmark(*args, **kwargs)

    with mock.patch.object(timer, "benchmark_cpu", alone):
        yield
