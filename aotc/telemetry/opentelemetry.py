"""`compiled.stats()` for OpenTelemetry, as observable counters that a meter reads at each export.

The instruments are `aotc.calls`, `aotc.padded_calls`, `aotc.request_elements`, `aotc.run_elements` with the attributes
`aotc.model` and `aotc.bucket`; `aotc.misses` and `aotc.contiguous_copies` with `aotc.model`; and `aotc.errors` with
`aotc.model` and `aotc.kind`, the class of the exception.
"""

from __future__ import annotations

from collections.abc import Iterable

try:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
except ModuleNotFoundError as error:
    error.add_note("  hint: pip install 'aotc[opentelemetry]'")
    raise

from aotc.telemetry.call_metrics import COUNTERS, Counter, Models, current, values


def observe(models: Models, meter: Meter | None = None) -> None:
    """Export the counters of these models with a meter, by default the global meter provider's.

    Args:
        models: compiled models by the value of `aotc.model`, or a function that returns them at each export. Name the
            release as well (`"encoder:v2"`) where models are replaced: counters begin at 0 with each load.
        meter: where the instruments are made. Call this once for each meter.

    Example:
        >>> from opentelemetry.sdk.metrics import MeterProvider
        >>> from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        >>> reader = InMemoryMetricReader()
        >>> observe({"quickstart": compiled}, MeterProvider([reader]).get_meter("service"))
        >>> len(reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics)
        7
    """
    meter = meter or get_meter("aotc")
    for counter in COUNTERS:
        meter.create_observable_counter(
            f"aotc.{counter.name}", [_Callback(counter, models)], unit=counter.unit, description=counter.text
        )


class _Callback:
    def __init__(self, counter: Counter, models: Models) -> None:
        self._counter, self._models = counter, models

    def __call__(self, options: CallbackOptions) -> Iterable[Observation]:
        stats = {name: compiled.stats() for name, compiled in current(self._models).items()}
        names = [f"aotc.{label}" for label in self._counter.labels]
        for labels, value in values(self._counter, stats):
            yield Observation(value, dict(zip(names, labels, strict=True)))
