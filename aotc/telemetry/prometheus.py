"""`compiled.stats()` for Prometheus, read at each scrape.

- by model and bucket: `aotc_calls_total`, `aotc_padded_calls_total`, `aotc_request_elements_total` and
  `aotc_run_elements_total`
- by model: `aotc_misses_total`, `aotc_contiguous_copies_total`
- by model and kind, the class of the exception: `aotc_errors_total`
- `aotc_artifact_info`, always 1, with the labels model, target, digest and torch

The sums over buckets are `Stats.counters()`. A collector belongs to one process: the multiprocess mode of
`prometheus_client` does not run collectors, so scrape each worker.
"""

from __future__ import annotations

from collections.abc import Iterable

try:
    from prometheus_client.core import CounterMetricFamily, InfoMetricFamily, Metric
except ModuleNotFoundError as error:
    error.add_note("  hint: pip install 'aotc[prometheus]'")
    raise

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
        info = InfoMetricFamily("aotc_artifact", "What was loaded.", labels=["model"])
        for name, compiled in models.items():
            loaded = compiled.forward.loaded
            made_for = {"target": compiled.artifact.target, "torch": compiled.artifact.environment.torch}
            info.add_metric([name], {**made_for, "digest": loaded.digest if loaded else ""})
        yield info
