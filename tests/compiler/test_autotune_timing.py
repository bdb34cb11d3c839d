"""Autotuning's times on a CPU, where something else takes the cores most of the time."""

from __future__ import annotations

import itertools
import pickle
import time

import pytest

from aotc.compiler.autotune.benchmarks import MeasuredTime, cpu_benchmarks_alone, least_milliseconds
from aotc.compiler.autotune.picker import with_time
from aotc.picks import Candidate


@pytest.mark.parametrize("undisturbed", [2, 4], ids=["every second call", "every fourth call"])
def test_a_time_is_that_of_a_call_that_nothing_disturbs(undisturbed: int) -> None:
    calls = itertools.count()
    ms = least_milliseconds(lambda: time.sleep(0.001 if next(calls) % undisturbed == 0 else 0.02), 5, 100)
    assert 1 <= ms < 10


def test_a_time_brings_its_median_and_count_and_can_be_pickled() -> None:
    times = MeasuredTime([3.0, 1.0, 2.0, 5.0])
    for one in (times, pickle.loads(pickle.dumps(times))):
        assert (one, one.median, one.calls, one.is_wide) == (1.0, 2.5, 4, True)
    timed = with_time(Candidate("mm"), times)
    assert (timed.ms, timed.median_ms, timed.calls, timed.is_wide) == (1.0, 2.5, 4, True)
    alone = with_time(Candidate("mm"), 1.0)
    assert (alone.median_ms, alone.calls, alone.is_wide) == (None, 0, False)


def test_a_time_that_is_wide_is_measured_for_longer() -> None:
    calls = itertools.count()
    began = time.monotonic()
    disturbed = least_milliseconds(lambda: time.sleep(0.001 if next(calls) % 3 == 0 else 0.01), 1, 60)
    assert disturbed.is_wide and time.monotonic() - began > (1 + 60 + 4 * 60) / 1000


def test_inductor_takes_that_time() -> None:
    from torch._inductor.runtime.benchmarking import Benchmarker

    calls = itertools.count()
    with cpu_benchmarks_alone():
        ms = Benchmarker().benchmark_cpu(lambda: time.sleep(0.02 if next(calls) % 3 else 0.001))
    assert 1 <= ms < 10
