"""What one call takes, as the smoke run measures it: compiled and in eager, by turns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
import torch

from aotc.compiler.smoke import call_times as module
from aotc.compiler.smoke.call_times import TimedCall, call_times
from aotc.provenance import CallTimes


def timed(compiled: Callable[[], None], eager: Callable[[], None]) -> tuple[CallTimes, list[int]]:
    """The times of both after their first calls, and how many calls of each were made."""
    one, other = TimedCall(compiled), TimedCall(eager)

    def call(function: Callable[[], None]) -> None:
        function()

    one()
    with contextlib.suppress(ValueError):
        other()
    measured = call_times(one, other, call, torch.device("cpu"))
    return measured, [len(one.ms), len(other.ms)]


def sleeping(*seconds: float) -> Callable[[], None]:
    """Calls take these seconds one after the other, and then the last of them."""
    left = list(seconds)
    return lambda: time.sleep(left.pop(0) if len(left) > 1 else left[0])


def test_the_least_of_many_calls_is_given_and_the_first_is_left_out() -> None:
    times, counts = timed(sleeping(0.1, 0.002), sleeping(0.1, 0.004))
    assert times.eager is not None
    assert 2 <= times.compiled.least_ms < times.eager.least_ms and times.eager.least_ms >= 4
    assert times.compiled.median_ms < 50
    assert times.compiled.calls == times.eager.calls == counts[0] - 1 >= 3


def test_the_time_that_a_unit_is_timed_is_bounded() -> None:
    began = time.monotonic()
    timed(sleeping(0.001), sleeping(0.001, 0.0005, 0.05, 0.001, 0.05))  # wide apart, so that it lasts longest
    assert time.monotonic() - began < 4 * module.SECONDS + 3  # a round that began before, on any machine


def test_a_process_that_waited_for_a_cpu_was_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "seconds_waited", iter([1.0, 11.0]).__next__)
    times, _ = timed(sleeping(0.002), sleeping(0.1, 0.008))
    assert times.waited > 1 and times.on_busy_machine and times.speedup is None


def test_a_slow_model_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW", 0.05)
    times, counts = timed(sleeping(0.03), sleeping(0.03))
    assert counts == [1, 1] and times.compiled.calls == 1 and times.compiled.least_ms >= 30


def test_eager_that_fails_has_no_time() -> None:
    def failing() -> None:
        raise ValueError

    times, counts = timed(sleeping(0.001), failing)
    assert times.eager is None and times.compiled.calls == 1 and counts == [1, 0]


def test_eager_that_fails_later_keeps_the_times_that_it_has() -> None:
    calls = iter([None, None])

    def once_more() -> None:
        if next(calls, "over") == "over":
            raise RuntimeError("a model that cannot be called again")

    times, _ = timed(sleeping(0.001), once_more)
    assert times.eager is not None and times.eager.calls == 1
