"""Counters of one callable: cheap, monotonic, fit for a metrics exporter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from aotc.runtime.dispatch import Plan
from aotc.runtime.forks import renew_in_child

KEPT_MISSES = 1000
"""Distinct kinds of miss that are kept by name; further ones are only counted."""
LOGGED_A_MINUTE = 10
"""Kinds of miss of one callable that are logged."""


class BucketStats(msgspec.Struct):
    """Calls that ran in one bucket.

    calls: how many. padded_calls: how many of them were padded. request_elements: elements of all their input tensors
    as the caller gave them. run_elements: the same after padding.
    """

    calls: int = 0
    padded_calls: int = 0
    request_elements: int = 0
    run_elements: int = 0

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


class Counters:
    """Counters of a callable. Methods may be called from any thread, and by a signal handler within another method."""

    def __init__(self, buckets: Sequence[str]) -> None:
        self._lock = threading.RLock()
        self._names = list(buckets)
        self._buckets = [BucketStats() for _ in buckets]
        self._misses = 0
        self._miss_kinds: dict[str, int] = {}
        self._kind_of: dict[int, str] = {}
        self._minute, self._logged, self._unlogged = -60.0, 0, 0
        self._copies = 0
        self._errors: dict[str, int] = {}
        renew_in_child(self, Counters._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def count_call(self, plan: Plan) -> None:
        with self._lock:
            bucket = self._buckets[plan.variant]
            bucket.calls += 1
            bucket.request_elements += plan.request_elements
            bucket.run_elements += plan.run_elements
            if plan.pads:
                bucket.padded_calls += 1

    def count_error(self, error: BaseException) -> None:
        with self._lock:
            kind = type(error).__name__
            self._errors[kind] = self._errors.get(kind, 0) + 1

    def count_copies(self, copies: int) -> None:
        with self._lock:
            self._copies += copies

    def count_miss(self, form: object, describe: Callable[[], str]) -> str:
        """Count a miss of a call of this `form`, which is hashable; `describe` names its kind, and takes its time.

        Returns what to log: the kind, where it is new and LOGGED_A_MINUTE were not exceeded, else "".
        """
        key = hash(form)
        with self._lock:
            self._misses += 1
            known = self._kind_of.get(key)
            if known is not None:
                self._miss_kinds[known] += 1
                return ""
            if len(self._kind_of) >= KEPT_MISSES:
                return ""
        kind = describe()
        with self._lock:
            self._kind_of[key] = kind
            new = kind not in self._miss_kinds
            self._miss_kinds[kind] = self._miss_kinds.get(kind, 0) + 1
            return self._to_log(kind) if new else ""

    def _to_log(self, kind: str) -> str:
        now = time.monotonic()
        if now - self._minute >= 60:
            self._minute, self._logged = now, 0
        if self._logged >= LOGGED_A_MINUTE:
            self._unlogged += 1
            return ""
        self._logged += 1
        more, self._unlogged = self._unlogged, 0
        return f"{kind} ({more} other kinds were not logged; `stats()` has them)" if more else kind

    def snapshot(self) -> Stats:
        with self._lock:
            buckets = {
                name: msgspec.structs.replace(stats) for name, stats in zip(self._names, self._buckets, strict=True)
            }
            return Stats(
                calls=sum(stats.calls for stats in buckets.values()),
                buckets=buckets,
                misses=self._misses,
                miss_kinds=dict(self._miss_kinds),
                contiguous_copies=self._copies,
                errors=dict(self._errors),
            )
