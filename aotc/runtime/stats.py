"""The counters of one callable: monotonic, fit for a metrics exporter."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from aotc.runtime.counters import FIRST_BITS, SPANS

if TYPE_CHECKING:
    from aotc.runtime.counters import Counters

KEPT_MISSES = 1000
"""Distinct kinds of miss that are kept by name; further ones are only counted."""
LOGGED_A_MINUTE = 10
"""Kinds of miss of one callable that are logged."""


CALL_SECONDS = tuple(2**bits / 1e9 for bits in range(FIRST_BITS, FIRST_BITS + SPANS - 1))
"""Where the spans of `BucketStats.spans` end, in seconds: 8.2 µs, 16.4 µs, … 69 s; the last span has no end."""


class BucketStats(msgspec.Struct):
    """Calls that ran in one bucket.

    calls: how many. padded_calls: how many of them were padded. request_elements: elements of all their input tensors
    as the caller gave them. run_elements: the same after padding. seconds: that they took; of a GPU, until the call
    returned, which is not when the GPU was done. spans: how many took up to each of CALL_SECONDS and no less, and how
    many took longer. Replays of a training step are counted as calls, and are not timed.
    """

    calls: int = 0
    padded_calls: int = 0
    request_elements: int = 0
    run_elements: int = 0
    seconds: float = 0.0
    spans: tuple[int, ...] = (0,) * SPANS

    @property
    def padding_waste(self) -> float:
        """The share of the input elements run that was padding: 0 is none."""
        return 1 - self.request_elements / self.run_elements if self.run_elements else 0.0


class Stats(msgspec.Struct):
    """A snapshot of the counters of one callable since its load.

    calls: calls that ran compiled. buckets: of them by the bucket's name. misses: calls that no bucket took, whatever
    `on_miss` did. miss_kinds: of them by kind, in words. contiguous_copies: inputs that were copied into the compiled
    layout (`make_contiguous`). errors: calls that a bucket took and that raised, by the name of the exception's class.
    """

    calls: int
    buckets: dict[str, BucketStats]
    misses: int
    miss_kinds: dict[str, int]
    contiguous_copies: int
    errors: dict[str, int] = {}

    def counters(self) -> dict[str, int]:
        """Flat monotonic counters by metric name, for a Prometheus exporter."""
        return {
            "aotc_calls_total": self.calls,
            "aotc_misses_total": self.misses,
            "aotc_errors_total": sum(self.errors.values()),
            "aotc_contiguous_copies_total": self.contiguous_copies,
            "aotc_padded_calls_total": sum(bucket.padded_calls for bucket in self.buckets.values()),
            "aotc_request_elements_total": sum(bucket.request_elements for bucket in self.buckets.values()),
            "aotc_run_elements_total": sum(bucket.run_elements for bucket in self.buckets.values()),
        }


def add_to(total: BucketStats, counted: BucketStats) -> None:
    """Add a bucket's counters to those of another."""
    spans = tuple(map(operator.add, total.spans, counted.spans))
    for name in ("calls", "padded_calls", "request_elements", "run_elements", "seconds"):
        setattr(total, name, getattr(total, name) + getattr(counted, name))
    total.spans = spans


def snapshot(counters: Counters) -> Stats:
    with counters.lock:
        rows = [[*row] for row in counters.rows]
        for row, seen in zip(rows, counters.native(), strict=False):
            row[: len(seen)] = map(operator.add, row, seen)
        buckets = {
            name: BucketStats(calls, padded, request, ran, nanoseconds / 1e9, tuple(spans))
            for name, (calls, padded, request, ran, nanoseconds, *spans) in zip(counters.names, rows, strict=True)
        }
        return Stats(
            calls=sum(stats.calls for stats in buckets.values()),
            buckets=buckets,
            misses=counters.misses,
            miss_kinds=dict(counters.miss_kinds),
            contiguous_copies=counters.copies,
            errors=dict(counters.errors),
        )


def count_miss(counters: Counters, form: object, describe: Callable[[], str]) -> str:
    """Count a miss of a call of this `form`, which is hashable; `describe` names its kind, and takes its time.

    Returns what to log: the kind, where it is new and LOGGED_A_MINUTE were not exceeded, else "".
    """
    key = hash(form)
    with counters.lock:
        counters.misses += 1
        known = counters.kind_of.get(key)
        if known is not None:
            counters.miss_kinds[known] += 1
            return ""
        if len(counters.kind_of) >= KEPT_MISSES:
            return ""
    kind = describe()
    with counters.lock:
        counters.kind_of[key] = kind
        new = kind not in counters.miss_kinds
        counters.miss_kinds[kind] = counters.miss_kinds.get(kind, 0) + 1
        return _to_log(counters, kind) if new else ""


def _to_log(counters: Counters, kind: str) -> str:
    now = time.monotonic()
    minute, logged, unlogged = counters.log
    if now - minute >= 60:
        minute, logged = now, 0
    if logged >= LOGGED_A_MINUTE:
        counters.log = minute, logged, unlogged + 1
        return ""
    counters.log = minute, logged + 1, 0
    return f"{kind} ({unlogged} other kinds were not logged; `stats()` has them)" if unlogged else kind
