"""What a service exports: counters, sampled sizes, and the startup report."""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hand_built import make_compiled, tensor

from aotc.call_table.dispatch import Plan
from aotc.errors import BindError, LibraryError, MissError, NotFoundError
from aotc.records import Output, PadRule
from aotc.runtime.compiled import Compiled
from aotc.runtime.counters import Counters
from aotc.runtime.load import compiled_module
from aotc.runtime.stats import CALL_SECONDS, snapshot
from aotc.telemetry import ShapeSample, log_startup, sample_shapes
from aotc.tools.advise import read_trace
from examples.models import transformer_block


@pytest.fixture
def compiled() -> Compiled:
    """x*2 for seq 4 and 8, padded; called with 3, 4, 4, 7 and 9, which misses, and with a value at which it fails."""

    def double(x: torch.Tensor) -> torch.Tensor:
        if x.max() > 1:
            raise LibraryError("the library failed")
        return x * 2

    call = make_compiled(
        double,
        [tensor("x", "seq", 2, pad={"seq": PadRule()})],
        [{"seq": 4}, {"seq": 8}],
        outputs=(Output(index=0, dims=("seq", "")),),
    )
    return compiled_module(call)


def call_all(compiled: Compiled, *sizes: int) -> None:
    for size in sizes:
        compiled(torch.ones(size, 2))


def call_and_miss(compiled: Compiled) -> None:
    call_all(compiled, 3, 4, 4, 7)
    with pytest.raises(MissError):
        compiled(torch.ones(9, 2))
    with pytest.raises(LibraryError):
        compiled(torch.full((4, 2), 2.0))


# -- counters ---------------------------------------------------------------------------------------------------------


def test_prometheus_scrapes_counters_by_bucket_that_add_up_to_those_of_stats(compiled: Compiled) -> None:
    client = pytest.importorskip("prometheus_client")
    from aotc.telemetry.prometheus import StatsCollector

    registry = client.CollectorRegistry()
    registry.register(StatsCollector(lambda: {"doubling:v1": compiled}))
    call_and_miss(compiled)
    text = client.generate_latest(registry).decode()
    assert 'aotc_calls_total{bucket="seq=4",model="doubling:v1"} 3.0' in text
    assert 'aotc_padded_calls_total{bucket="seq=8",model="doubling:v1"} 1.0' in text
    assert 'aotc_misses_total{model="doubling:v1"} 1.0' in text
    assert 'aotc_errors_total{kind="LibraryError",model="doubling:v1"} 1.0' in text
    assert re.search(rf'aotc_artifact_info{{.*torch="{re.escape(compiled.artifact.environment.torch)}".*}} 1.0', text)
    sums: Counter[str] = Counter()
    for name, value in re.findall(r"^(\w+_total){.*} (\d+)\.0$", text, re.MULTILINE):
        sums[name] += int(value)
    assert dict(sums) == compiled.stats().counters()


def test_the_seconds_of_calls_are_a_histogram_by_bucket() -> None:
    """Three calls of 20 ms and one of none are in the spans that hold 20 ms and less than 1 ms."""
    client = pytest.importorskip("prometheus_client")
    from aotc.telemetry.prometheus import StatsCollector

    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 * float(x.max()))
        return x

    compiled = compiled_module(make_compiled(slow, [tensor("x", "seq")], [{"seq": 4}, {"seq": 8}]))
    for value in (1, 1, 1, 0):
        compiled(torch.full((4,), float(value)))
    registry = client.CollectorRegistry()
    registry.register(StatsCollector({"m": compiled}))
    text = client.generate_latest(registry).decode()
    counts = {
        float(end): float(n)
        for end, n in re.findall(r'^aotc_call_seconds_bucket{.*le="(.*?)".*} (.*)$', text, re.MULTILINE)
    }
    assert list(counts.values()) == sorted(counts.values())
    assert counts[2**24 / 1e9] == 1 and counts[float("inf")] == 4, "less than 16.8 ms: the one that did not sleep"
    assert 'aotc_call_seconds_count{bucket="seq=4",model="m"} 4.0' in text
    assert "seq=8" not in "".join(re.findall("^aotc_call_seconds.*$", text, re.MULTILINE)), "which has no calls"
    (total,) = re.findall(r"^aotc_call_seconds_sum.* (.*)$", text, re.MULTILINE)
    assert float(total) == compiled.stats().buckets["seq=4"].seconds >= 0.06


@pytest.mark.parametrize(("nanoseconds", "span"), [(0, 0), (8192, 0), (8193, 1), (16384, 1), (2**36, 23), (2**50, 24)])
def test_a_call_is_counted_in_the_span_that_ends_at_or_behind_its_time(nanoseconds: int, span: int) -> None:
    counters = Counters(["b"])
    counters.count_call(Plan(0, "", (), (), (), (), (), 1, 1), nanoseconds)
    (spans,) = (each.spans for each in snapshot(counters).buckets.values())
    assert spans.index(1) == span and sum(spans) == 1
    assert all(nanoseconds <= 1e9 * end for end in CALL_SECONDS[span:])
    assert all(nanoseconds > 1e9 * end for end in CALL_SECONDS[:span])


def test_a_load_is_a_span_with_its_parts(quickstart_store: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from aotc.telemetry.opentelemetry import traced_load

    provider, seen = sdk.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(seen))
    tracer = provider.get_tracer("test")
    ref = f"{quickstart_store}#quickstart"
    compiled = traced_load(ref, transformer_block(width=256, heads=4).eval(), tracer=tracer)
    *parts, whole = seen.get_finished_spans()
    loaded = compiled.forward.loaded
    assert [part.name for part in parts] == [f"aotc.load.{name}" for name in loaded.load_ms]
    assert whole.attributes["aotc.digest"] == loaded.digest and whole.attributes["aotc.buckets"] == 2
    assert {part.parent.span_id for part in parts} == {whole.context.span_id}
    assert whole.start_time <= parts[0].start_time and parts[-1].end_time <= whole.end_time
    seen.clear()
    with pytest.raises(NotFoundError):
        traced_load(f"{ref}:v9", tracer=tracer)
    (failed,) = seen.get_finished_spans()
    assert not failed.status.is_ok and failed.events[0].attributes["exception.type"].endswith("NotFoundError")


def test_opentelemetry_observes_the_same(compiled: Compiled) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from aotc.telemetry.opentelemetry import observe

    reader = InMemoryMetricReader()
    observe({"doubling": compiled}, sdk.MeterProvider([reader]).get_meter("test"))
    call_and_miss(compiled)
    data = reader.get_metrics_data()
    assert data is not None
    metrics = {metric.name: metric.data for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert all(metric.is_monotonic for metric in metrics.values())
    calls = {point.attributes["aotc.bucket"]: point.value for point in metrics["aotc.calls"].data_points}
    assert calls == {"seq=4": 3, "seq=8": 1}
    errors = {point.attributes["aotc.kind"]: point.value for point in metrics["aotc.errors"].data_points}
    assert errors == {"LibraryError": 1}
    seconds = metrics.pop("aotc.call_seconds").data_points
    assert {point.attributes["aotc.bucket"]: point.value for point in seconds} == {
        name: bucket.seconds for name, bucket in compiled.stats().buckets.items()
    }
    sums = {f"{name.replace('.', '_')}_total": sum(p.value for p in data.data_points) for name, data in metrics.items()}
    assert sums == compiled.stats().counters()


@pytest.mark.parametrize(("client", "extra"), [("prometheus_client", "prometheus"), ("opentelemetry", "opentelemetry")])
def test_without_its_client_library_an_exporter_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, client: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == client]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, client, None)
    monkeypatch.delitem(sys.modules, f"aotc.telemetry.{extra}", raising=False)
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(f"aotc.telemetry.{extra}")
    assert raised.value.__notes__ == [f"  hint: pip install 'aotc[{extra}]'"]


# -- shapes -----------------------------------------------------------------------------------------------------------


def test_sampled_sizes_are_a_trace_that_holds_padded_calls_and_misses(compiled: Compiled, tmp_path: Path) -> None:
    sample = sample_shapes(compiled)
    call_and_miss(compiled)
    sample.write(tmp_path / "trace.jsonl")
    with (tmp_path / "trace.jsonl").open("rb") as lines:
        trace = read_trace(lines, "trace")
    assert (trace.dims, trace.counts) == (("seq",), {(3,): 1, (4,): 3, (7,): 1, (9,): 1})


def test_taking_the_lines_starts_anew_and_stopping_ends_the_sample(compiled: Compiled) -> None:
    sample = sample_shapes(compiled)
    call_all(compiled, 3)
    assert sample.take() == ['{"seq": 3, "count": 1}']
    call_all(compiled, 4)
    sample.stop()
    call_all(compiled, 8)
    assert sample.take() == ['{"seq": 4, "count": 1}'] and sample.take() == []


def test_of_more_calls_than_are_kept_each_has_the_same_chance() -> None:
    """Of 30,000 calls whose sizes drift, 1,000 are kept: each third of the time has a third of them, within 5 σ."""
    sample = ShapeSample(["n"], most=1000, seed=4)
    for n in range(30_000):
        sample.note((1 + n // 10_000,))
    counts = {entry["n"]: entry["count"] for entry in map(json.loads, sample.lines())}
    assert sample.seen == 30_000 and sum(counts.values()) == pytest.approx(30_000, abs=3)
    assert all(count == pytest.approx(10_000, abs=5 * 30 * (1000 * 2 / 9) ** 0.5) for count in counts.values())


def test_threads_may_note_at_once() -> None:
    sample = ShapeSample(["n"], most=50)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: [sample.note((n,)) for _ in range(2000)], range(1, 5)))
    assert sample.seen == 8000


def test_a_model_without_dims_has_no_sizes_to_sample() -> None:
    compiled = compiled_module(make_compiled(lambda x: x, [tensor("x", 2)]))
    with pytest.raises(BindError, match="no dims"):
        sample_shapes(compiled)


# -- the startup report -----------------------------------------------------------------------------------------------


def test_the_startup_report_is_one_line_of_json(compiled: Compiled, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="aotc"):
        log_startup({"doubling": compiled})
    (record,) = caplog.records
    report = json.loads(record.getMessage())
    assert report == record.__dict__["aotc"] and report["event"] == "aotc.startup"
    assert report["models"]["doubling"] == {
        "target": compiled.artifact.target,
        "device": "cpu",
        "buckets": 2,
        "weights": "live",
    }
