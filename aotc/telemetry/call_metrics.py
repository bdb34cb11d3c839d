"""The counters of `compiled.stats()` by model and bucket, and how exporters call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from aotc.runtime.compiled import Compiled
from aotc.runtime.stats import BucketStats, Stats

Models = Mapping[str, Compiled] | Callable[[], Mapping[str, Compiled]]
"""Compiled models by the name that their counters get; or a function that is asked at each export, for a service that
replaces models while it runs."""


class Counter(NamedTuple):
    """`name` without prefix and suffix, a UCUM `unit`, a sentence, and the value of each bucket, of the model, or of
    each kind."""

    name: str
    unit: str
    text: str
    of_bucket: Callable[[BucketStats], int] | None = None
    of_model: Callable[[Stats], int] | None = None
    of_kind: Callable[[Stats], Mapping[str, int]] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of what tells its series apart."""
        return ("model", *(["bucket"] if self.of_bucket else []), *(["kind"] if self.of_kind else []))


COUNTERS = (
    Counter("calls", "{call}", "Calls that ran compiled.", of_bucket=lambda bucket: bucket.calls),
    Counter("padded_calls", "{call}", "Calls whose inputs were padded.", of_bucket=lambda bucket: bucket.padded_calls),
    Counter(
        "request_elements",
        "{element}",
        "Elements of the input tensors as the caller gave them.",
        of_bucket=lambda bucket: bucket.request_elements,
    ),
    Counter(
        "run_elements",
        "{element}",
        "Elements of the input tensors after padding.",
        of_bucket=lambda bucket: bucket.run_elements,
    ),
    Counter("misses", "{call}", "Calls that no bucket took.", of_model=lambda stats: stats.misses),
    Counter("errors", "{call}", "Calls that a bucket took and that raised.", of_kind=lambda stats: stats.errors),
    Counter(
        "contiguous_copies",
        "{copy}",
        "Inputs that were copied into the compiled layout.",
        of_model=lambda stats: stats.contiguous_copies,
    ),
)


def values(counter: Counter, stats: Mapping[str, Stats]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The values of `labels`, and the count, for each series of a counter."""
    for model, own in stats.items():
        if counter.of_bucket is not None:
            for bucket, of_bucket in own.buckets.items():
                yield (model, bucket), counter.of_bucket(of_bucket)
        if counter.of_model is not None:
            yield (model,), counter.of_model(own)
        if counter.of_kind is not None:
            for kind, count in counter.of_kind(own).items():
                yield (model, kind), count


def current(models: Models) -> Mapping[str, Compiled]:
    """The models now."""
    return models() if callable(models) else models
