"""What a service tells about its compiled models. Nothing here is imported by `aotc.load`.

- `startup`: the state of the process once its models are loaded, as one log line of JSON
- `shapes`: a sample of the sizes that calls have, as a trace for `aotc advise`
- `prometheus`, `opentelemetry`: `compiled.stats()` through these client libraries, which the extras
  `aotc[prometheus]` and `aotc[opentelemetry]` install
- `call_metrics`: which counters both export
- `advisory_metrics`: what `aotc audit` found, for Prometheus
"""

from aotc.telemetry.shapes import ShapeSample, sample_shapes
from aotc.telemetry.startup import log_startup, startup_report

__all__ = ["ShapeSample", "log_startup", "sample_shapes", "startup_report"]
