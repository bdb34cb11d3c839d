"""`compiled.stats()` for Prometheus, read at each scrape.

- by model and bucket: `aotc_calls_total`, `aotc_padded_calls_total`, `aotc_request_elements_total` and
  `aotc_run_elements_total`
- by model: `aotc_misses_total`, `aotc_contiguous_copies_total`
- by model and kind, the class of the exception: `aotc_errors_total`
- by model and bucket: the histogram `aotc_call_seconds` of what compiled calls took; on a GPU until the call returned,
  which is not when the GPU was done. `rate(aotc_call_seconds_sum[1m])` is the share of the time in which calls run
- `aotc_artifact_info`, always 1, with the labels model, target, digest and torch

The sums over buckets are `Stats.counters()`. A collector belongs to one process: the multiprocess mode of
`prometheus_client` does not run collectors, so scrape each worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

try:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
except ModuleNotFoundError as error:
    error.add_note("  hint: pip install 'aotc[prometheus]'")
    raise

from aotc.runtime.stats import CALL_SECONDS, Stats
from aotc.telemetry.call_metrics import COUNTERS, Models, current, values


class StatsCollector:
    """A collector for `prometheus_client.CollectorRegistry.register`.

    Args:
        models: compiled models by the value of the label `model`, or a function that returns them at each scrape. Name
            the release as well (`"encoder:v2"`) where models are replaced: counters begin at 0 with each load.

    Example:
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> registry = CollectorRegistry()
        >>> registry.register(StatsCollector({"quickstart": compiled}))
        >>> print(generate_latest(registry).decode())
        # HELP aotc_calls_total Calls that ran compiled.
        # TYPE aotc_calls_total counter
        aotc_calls_total{bucket="batch=1,seq=128",model="quickstart"} 0.0
        ...
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """All metrics as they are now."""
        models = dict(current(self._models))
        stats = {name: compiled.stats() for name, compiled in models.items()}
        for counter in COUNTERS:
            family = CounterMetricFamily(f"aotc_{counter.name}", counter.text, labels=counter.labels)
            for labels, value in values(counter, stats):
                family.add_metric(labels, value)
            yield family
        yield _call_seconds(stats)
        info = InfoMetricFamily("aotc_artifact", "What was loaded.", labels=["model"])
        for name, compiled in models.items():
            loaded = compiled.forward.loaded
            made_for = {"target": compiled.artifact.target, "torch": compiled.artifact.environment.torch}
            info.add_metric([name], {**made_for, "digest": loaded.digest if loaded else ""})
        yield info


def _call_seconds(stats: Mapping[str, Stats]) -> Metric:
    family = HistogramMetricFamily("aotc_call_seconds", "Seconds of compiled calls.", labels=["model", "bucket"])
    ends = (*map(str, CALL_SECONDS), "+Inf")
    for model, own in stats.items():
        for bucket, calls in own.buckets.items():
            if any(calls.spans):
                counts = itertools.accumulate(calls.spans)
                family.add_metric([model, bucket], list(zip(ends, counts, strict=True)), calls.seconds)
    return family
