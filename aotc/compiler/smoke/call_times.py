"""Measure the time of one call, compiled and in eager, in turns, on the example inputs of the smoke run."""

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
"""Seconds after which no further round (a call of each) begins; four times this for few rounds or a wide spread."""
SLOW = 4.0
"""Seconds; a first round, with cold code and memory, that takes longer is the only one."""
FEW_ROUNDS, MOST_ROUNDS = 10, 100


class TimedCall:
    """Calls a function, and records the milliseconds of each call, with all work that it started on the device."""

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
        """The spread of all calls but the first; of the first if it was the only one."""
        return spread_of(self.ms[1:] or self.ms) if self.ms else None


def call_times(
    compiled: TimedCall, eager: TimedCall, call: Callable[[TimedCall], Any], device: torch.device
) -> CallTimes:
    """The times of both. Each must have been called at least once; eager may have failed.

    `call` makes one call: it copies the inputs and restores the state, which is not timed. No other unit of any build
    runs meanwhile.
    """
    with device_alone(device):
        began = time.monotonic()
        repeated = eager.ms and (compiled.ms[-1] + eager.ms[-1]) / 1e3 < SLOW
        for done in range(1, MOST_ROUNDS + 1 if repeated else 1):
            call(compiled)
            try:
                call(eager)
            except Exception:  # a model that cannot be called again does not make its compiled code wrong
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
