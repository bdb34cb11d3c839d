"""`compiled.stats()` for OpenTelemetry, as observable counters that a meter reads at each export.

The instruments are `aotc.calls`, `aotc.padded_calls`, `aotc.request_elements`, `aotc.run_elements` and
`aotc.call_seconds` with the attributes `aotc.model` and `aotc.bucket`; `aotc.misses` and `aotc.contiguous_copies` with
`aotc.model`; and `aotc.errors` with `aotc.model` and `aotc.kind`, the class of the exception. The seconds of calls are
a sum, for their mean: a meter observes no histograms, and `aotc.telemetry.prometheus` exports one.
`traced_load` is `aotc.load` in a span.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torch import nn

try:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
    from opentelemetry.trace import Tracer, get_tracer
except ModuleNotFoundError as error:
    error.add_note("  hint: pip install 'aotc[opentelemetry]'")
    raise

from aotc.runtime.compiled import Compiled
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
        8
    """
    meter = meter or get_meter("aotc")
    meter.create_observable_counter(
        "aotc.call_seconds", [_CallSeconds(models)], unit="s", description="Seconds of compiled calls."
    )
    for counter in COUNTERS:
        meter.create_observable_counter(
            f"aotc.{counter.name}", [_Callback(counter, models)], unit=counter.unit, description=counter.text
        )


def traced_load(ref: str, module: nn.Module | None = None, *, tracer: Tracer | None = None, **options: Any) -> Compiled:
    """`aotc.load(ref, module, **options)` in a span `aotc.load`, with one below it for each part of the load.

    The span has the attributes `aotc.ref`, `aotc.model`, `aotc.target`, `aotc.digest` and `aotc.buckets` (how many).
    Parts are `aotc.load.record` (which fetches, verifies and reads), `.module`, `.libraries` and `.graphs`.

    Args:
        tracer: makes the spans; by default the global tracer provider's.

    Raises what `aotc.load` raises; the span then has the error.

    Example:
        >>> from examples.models import transformer_block
        >>> traced_load("aotc-store#quickstart", transformer_block(width=256, heads=4).eval()).buckets
        ['batch=1,seq=128', 'batch=4,seq=128']
    """
    from aotc.runtime.load import load

    tracer = tracer or get_tracer("aotc")
    began = time.time_ns()
    with tracer.start_as_current_span("aotc.load", attributes={"aotc.ref": ref}, start_time=began) as span:
        compiled = load(ref, module, **options)
        loaded, artifact = compiled.forward.loaded, compiled.artifact
        assert loaded is not None
        span.set_attributes({"aotc.model": artifact.model, "aotc.target": artifact.target})
        span.set_attributes({"aotc.digest": loaded.digest, "aotc.buckets": len(artifact.variants)})
        for part, milliseconds in loaded.load_ms.items():
            ended = began + round(milliseconds * 1e6)
            tracer.start_span(f"aotc.load.{part}", start_time=began).end(ended)
            began = ended
    return compiled


class _Callback:
    def __init__(self, counter: Counter, models: Models) -> None:
        self._counter, self._models = counter, models

    def __call__(self, options: CallbackOptions) -> Iterable[Observation]:
        stats = {name: compiled.stats() for name, compiled in current(self._models).items()}
        names = [f"aotc.{label}" for label in self._counter.labels]
        for labels, value in values(self._counter, stats):
            yield Observation(value, dict(zip(names, labels, strict=True)))


class _CallSeconds:
    def __init__(self, models: Models) -> None:
        self._models = models

    def __call__(self, options: CallbackOptions) -> Iterable[Observation]:
        for model, compiled in current(self._models).items():
            for bucket, calls in compiled.stats().buckets.items():
                yield Observation(calls.seconds, {"aotc.model": model, "aotc.bucket": bucket})
