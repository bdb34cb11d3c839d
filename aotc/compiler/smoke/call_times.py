"""Measure the time of one call, compiled and in eager, in turns, on the example inputs of the smoke run."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from aotc.machine.benchmarking import device_alone, seconds_waited
from aotc.provenance import ENOUGH_CALLS, CallTimes, Spread

SECONDS = 0.25
"""Seconds after which no further round (a call of each) begins; with a wide spread, four times this."""
SECONDS_FOR_ENOUGH = 2.0
"""The same, while fewer than ENOUGH_CALLS rounds are done."""
SLOW = 4.0
"""Seconds; a first round, with cold code and memory, that takes longer is the only one."""
MOST_ROUNDS = 100


class TimedCall:
    """Calls a function, and records the milliseconds of each call, with all work that it started on the device."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.ms: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        synchronize()
        began = time.perf_counter()
        result = self._function(*args, **kwargs)
        synchronize()
        self.ms.append((time.perf_counter() - began) * 1e3)
        return result

    @property
    def spread(self) -> Spread | None:
        """The spread of all calls but the first; of the first if it was the only one."""
        return spread_of(self.ms[1:] or self.ms) if self.ms else None


def call_times(
    compiled: TimedCall,
    eager: TimedCall,
    call: Callable[[TimedCall], Any],
    device: torch.device,
    sizes: dict[str, int] | None = None,
) -> CallTimes:
    """The times of both, on inputs of these sizes. Each must have been called at least once; eager may have failed.

    `call` makes one call: it copies the inputs and restores the state, which is not timed. No other unit of any build
    runs meanwhile.
    """
    with device_alone(device):
        began, waited = time.monotonic(), seconds_waited()
        repeated = eager.ms and (compiled.ms[-1] + eager.ms[-1]) / 1e3 < SLOW
        for done in range(1, MOST_ROUNDS + 1 if repeated else 1):
            call(compiled)
            try:
                call(eager)
            except Exception:  # a model that cannot be called again does not make its compiled code wrong
                traceback.print_exc()
                break
            wide = any(timed.spread.is_wide for timed in (compiled, eager) if timed.spread)
            limit = SECONDS_FOR_ENOUGH if done < ENOUGH_CALLS else 4 * SECONDS if wide else SECONDS
            if time.monotonic() - began > limit:
                break
        share = (seconds_waited() - waited) / max(time.monotonic() - began, 1e-3) if repeated else 0.0
    measured = compiled.spread
    assert measured is not None
    return CallTimes(measured, eager.spread, sizes or {}, round(max(share, 0.0), 3))


def spread_of(ms: list[float]) -> Spread:
    return Spread(round(min(ms), 6), round(statistics.median(ms), 6), len(ms))


def synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
