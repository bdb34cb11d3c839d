"""Measure the cost of a region: a call of the model with its code attached and without, and the share of the time that
is spent passing arguments and results.

Passing is the time in the callables of the region's instances outside the library: binding, guards, the check of the
state, dispatch, building outputs. One library for the whole model passes once, not at each instance.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from aotc.compiler.smoke.call_times import synchronize
from aotc.machine.benchmarking import device_alone
from aotc.provenance import RegionCost
from aotc.runtime.compiled_regions import CompiledRegions
from aotc.runtime.libraries.library_protocol import Library

ROUNDS = 7
SECONDS = 1.0
"""Seconds for a measurement; a slow model gets fewer rounds, at least four, the first of which is not counted."""
SLOW = 4.0
"""Seconds after which two rounds are enough: of calls that take seconds, one is not far from the next."""


class _Clock:
    """Adds up the seconds and calls of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - began
            self.calls += 1


class _Timed:
    """A library whose runs are timed."""

    counts = None

    def __init__(self, library: Library) -> None:
        self.clock = _Clock(library.run)

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        given: list[Tensor] = self.clock(arguments)
        return given


def region_cost(
    compiled: CompiledRegions, region: str, library: Library, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> RegionCost:
    """The region's cost. `library` is the one variant of `compiled`; calls are timed with the device to themselves."""
    with device_alone(compiled.device):
        regions_ms, eager_ms = _with_and_without(compiled, region, args, kwargs)
        passing, calls = _passing(compiled, region, library, args, kwargs)
    return RegionCost(round(regions_ms, 5), round(eager_ms, 5), round(passing * regions_ms, 5), calls)


def _with_and_without(
    compiled: CompiledRegions, region: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[float, float]:
    with_it: list[float] = []
    without: list[float] = []
    for _ in _rounds():
        compiled.attach([region])
        with_it.append(_ms(compiled, args, kwargs))
        compiled.detach([region])
        without.append(_ms(compiled.module, args, kwargs))
    return statistics.median(with_it[1:]), statistics.median(without[1:])


def _passing(
    compiled: CompiledRegions, region: str, library: Library, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[float, int]:
    """The share of passing in a call of the model, by the host's clock, and the number of the region's calls.

    A share of the same call, since other work on the machine slows both.
    """
    timed = _Timed(library)
    other = CompiledRegions(compiled.artifact, [timed], compiled.bound, compiled.device, compiled.on_miss)
    other.detach()
    other.attach([region])
    instances = [compiled.module.get_submodule(path) for path in other.instances(region)]
    clocks = [_Clock(vars(instance)["forward"]) for instance in instances]
    own = [vars(instance)["forward"] for instance in instances]
    for instance, clock in zip(instances, clocks, strict=True):
        vars(instance)["forward"] = clock
    passing: list[float] = []
    calls = 0
    try:
        for _ in _rounds():
            before = [sum(clock.seconds for clock in clocks), timed.clock.seconds, timed.clock.calls]
            ms = _ms(compiled.module, args, kwargs)
            inside = sum(clock.seconds for clock in clocks) - before[0] - (timed.clock.seconds - before[1])
            passing.append(inside * 1e3 / ms)
            calls = timed.clock.calls - int(before[2])
    finally:
        for instance, forward in zip(instances, own, strict=True):
            vars(instance)["forward"] = forward
        other.detach()
    return statistics.median(passing[1:]), calls


def _rounds() -> Any:
    began = time.monotonic()
    for done in range(ROUNDS):
        took = time.monotonic() - began
        if (done > 3 and took > SECONDS) or (done > 1 and took > SLOW):
            return
        yield


def _ms(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Milliseconds of one call, with all work that it started on the device."""
    synchronize()
    began = time.perf_counter()
    function(*args, **kwargs)
    synchronize()
    return (time.perf_counter() - began) * 1e3
