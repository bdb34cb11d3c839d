"""Autotuning's times on a CPU, where something else takes the cores most of the time."""

from __future__ import annotations

import itertools
import time

import pytest

from aotc.compiler.autotune.benchmarks import cpu_benchmarks_alone, least_milliseconds


@pytest.mark.parametrize("undisturbed", [2, 4], ids=["every second call", "every fourth call"])
def test_a_time_is_that_of_a_call_that_nothing_disturbs(undisturbed: int) -> None:
    calls = itertools.count()
    ms = least_milliseconds(lambda: time.sleep(0.001 if next(calls) % undisturbed == 0 else 0.02), 5, 100)
    assert 1 <= ms < 10


def test_inductor_takes_that_time() -> None:
    from torch._inductor.runtime.benchmarking import Benchmarker

    calls = itertools.count()
    with cpu_benchmarks_alone():
        ms = Benchmarker().benchmark_cpu(lambda: time.sleep(0.02 if next(calls) % 3 else 0.001))
    assert 1 <= ms < 10
