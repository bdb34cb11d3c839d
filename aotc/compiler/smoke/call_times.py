"""What one call takes: compiled and in eager, by turns, on the example inputs of the smoke run."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from aotc.machine.benchmarking import device_alone
from aotc.provenance import CallTimes, Spread

SECONDS = 0.25
"""After which no further round begins, a call of each; four times as many for few rounds, or times wide apart."""
SLOW = 4.0
"""Seconds of the first round, in which code and memory are still cold, after which there is no other."""
FEW_ROUNDS, MOST_ROUNDS = 3, 100


class TimedCall:
    """Calls a function, and keeps the milliseconds of each call, with all that it started on the device."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.ms: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _synchronize()
        began = time.perf_counter()
        result = self._function(*args, **kwargs)
        _synchronize()
        self.ms.append((time.perf_counter() - began) * 1e3)
        return result

    @property
    def spread(self) -> Spread | None:
        """Without the first call, where there was another."""
        return spread_of(self.ms[1:] or self.ms) if self.ms else None


def call_times(
    compiled: TimedCall, eager: TimedCall, call: Callable[[TimedCall], Any], device: torch.device
) -> CallTimes:
    """The times of both, which have been called at least once (eager: or have failed).

    `call` makes one call: it copies the inputs and puts the state back, which is not timed. Nothing else of any build
    runs meanwhile.
    """
    with device_alone(device):
        began = time.monotonic()
        repeated = eager.ms and (compiled.ms[-1] + eager.ms[-1]) / 1e3 < SLOW
        for done in range(1, MOST_ROUNDS + 1 if repeated else 1):
            call(compiled)
            try:
                call(eager)
            except Exception:  # a model that cannot be called again is no flaw of its compiled code
                traceback.print_exc()
                break
            wide = any(timed.spread.is_wide for timed in (compiled, eager) if timed.spread)
            if time.monotonic() - began > (4 * SECONDS if wide or done < FEW_ROUNDS else SECONDS):
                break
    measured = compiled.spread
    assert measured is not None
    return CallTimes(measured, eager.spread)


def spread_of(ms: list[float]) -> Spread:
    return Spread(round(min(ms), 6), round(statistics.median(ms), 6), len(ms))


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
