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
    """`name` without prefix and suffix, a UCUM `unit`, a sentence, and the value of each bucket or of the model."""

    name: str
    unit: str
    text: str
    of_bucket: Callable[[BucketStats], int] | None = None
    of_model: Callable[[Stats], int] | None = None


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
    Counter(
        "contiguous_copies",
        "{copy}",
        "Inputs that were copied into the compiled layout.",
        of_model=lambda stats: stats.contiguous_copies,
    ),
)


def values(counter: Counter, stats: Mapping[str, Stats]) -> Iterator[tuple[str, str, int]]:
    """(model, bucket, value) for each series of a counter; the bucket is "" where the counter is the model's."""
    for model, own in stats.items():
        if counter.of_bucket is not None:
            for bucket, of_bucket in own.buckets.items():
                yield model, bucket, counter.of_bucket(of_bucket)
        if counter.of_model is not None:
            yield model, "", counter.of_model(own)


def current(models: Models) -> Mapping[str, Compiled]:
    """The models now."""
    return models() if callable(models) else models
