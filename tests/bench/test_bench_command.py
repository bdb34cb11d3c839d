"""`aotc bench`: what is started from which caches, and what the tables, the JSON and the page say."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from processes import ROOT

from aotc.cli import main
from aotc.tools.bench.bench_page import render_page
from aotc.tools.bench.bench_run import BenchOptions, Said
from aotc.tools.bench.contender_caches import FOLDERS, own_caches
from aotc.tools.bench.contender_messages import Counted, Launches, Started, Used
from aotc.tools.bench.contenders import CONTENDERS, with_sources
from aotc.tools.bench.latency_comparison import compare, latency_of
from aotc.tools.bench.measurements import BenchReport, BucketReport, ContenderMeasurements, Replayed, TraceReport
from aotc.tools.bench.subject import CalledSizes


def test_a_contender_brings_the_one_whose_caches_it_starts_from() -> None:
    assert with_sources(("aotc", "max-autotune-mega", "default-warm")) == (
        *("default", "default-warm", "max-autotune", "max-autotune-mega", "aotc"),
    )
    for contender in CONTENDERS.values():
        assert not contender.after or CONTENDERS[contender.after].keeps_caches


def test_a_process_has_its_own_caches_and_the_user_s_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", "release.pub")
    found = own_caches(tmp_path / "own")
    assert found["TORCHINDUCTOR_FREEZING"] == "1" and found["AOTC_TRUSTED_KEYS"] == "release.pub"
    for variable in FOLDERS:
        assert Path(found[variable]).is_dir() and Path(found[variable]).parent == tmp_path / "own"


# -- a report ---------------------------------------------------------------------------------------------------------


def started(first_call: float, *compilers: str, gpu: int | None = None) -> Started:
    steps = {"python": 0.02, "import torch": 0.9, "imports": 0.01, "device": 0.0, "model": 0.02, "load": 0.01}
    return Started({**steps, "first call": first_call}, compilers, 1e-6, 250 << 20, gpu)


def sample(name: str = "tiny", failure: str = "") -> BenchReport:
    eager, cold, ours = (
        ContenderMeasurements("eager", "eager", [started(0.02)] * 6, Used(1, None, 0, (), 0)),
        ContenderMeasurements(
            "default", "torch.compile default, cold", [started(14.0, "torch._dynamo")], failure=failure
        ),
        ContenderMeasurements("aotc", "aotc", [started(0.01)] * 6, Used(1, None, 0, (), 0)),
    )
    rounds = {"eager": 2.0, "default": 1.02, "aotc": 1.0}
    latencies = {name: latency_of([[ms * (1 + 0.01 * n) for n in range(20)]] * 6) for name, ms in rounds.items()}
    bucket = BucketReport("batch=1", {"batch": 1}, latencies, {"aotc": 3.0}, noise_floor=1.03)
    bucket.comparisons = [
        compare(name, latencies["aotc"].rounds, latencies[name].rounds, 1.03) for name in ("eager", "default")
    ]
    bucket.throughput = {"aotc": {1: Counted(500, 0.5), 2: Counted(900, 0.5)}, "eager": {1: Counted(250, 0.5)}}
    bucket.launches = {"aotc": Launches(1, 12), "eager": Launches(41, 41)}
    replayed = {
        name: Replayed(start, ms, latency_of([ms]), graphs, misses)
        for name, start, ms, graphs, misses in (
            ("default", started(14.0), (1.0, 9000.0, 1.0), 1, 0),
            ("aotc", started(0.01), (1.0, 1.0, 2.0), 0, 1),
        )
    }
    return BenchReport(
        name,
        "store#tiny",
        "sha256:00",
        "cpu:x86-64-v3",
        {"CPUs": "2", "processor": "a CPU"},
        {"torch": "2.13"},
        {one.name: one for one in (eager, cold, ours)},
        [bucket],
        TraceReport("trace.jsonl", 3, 2, replayed, ["max-autotune: it <failed>"]),
        notes=["2 of 3 buckets were measured"],
    )


def test_reattach_is_the_time_from_the_module_less_eager_s_first_call() -> None:
    report = sample()
    assert report.reattach("aotc") == pytest.approx((0.01 + 0.01) - (0.01 + 0.02))
    assert report.reattach("default") == pytest.approx(13.98)
    assert report.reattach("eager") is None
    assert report.contenders["aotc"].first_output == pytest.approx(0.97)


class Seen(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_what_the_report_says_and_is_one_file() -> None:
    report = sample("<script>tiny", "an <img src=x> error")
    report.waited = 0.5
    seen = Seen(render_page([report]))
    assert {"script", "img", "link"} & {tag for tag, _ in seen.tags} == {"link"}
    assert all(attributes["href"] == "data:," for tag, attributes in seen.tags if tag == "link")
    for text in (
        "<script>tiny",
        "torch.compile default, cold: an <img src=x> error",
        "aotc is 2 × as fast as eager (2 to 2)",
        "aotc and default do not differ beyond the noise (1.020, 1.020 to 1.020; but two processes of eager differ by",
        "Two processes of eager differ by up to 3.0 %",
        "busy machine: for each second of calls, threads waited 0.50 s",
        "1,000/s",  # 500 calls in half a second
        "1,800/s",
        "max-autotune: it <failed>",
        "2 of 3 buckets were measured",
    ):
        assert text in seen.text
    lines = [attributes["points"] for tag, attributes in seen.tags if tag == "polyline"]
    assert [len((points or "").split()) for points in lines] == [3, 3]


def bench(store: Path, *arguments: Any) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments), "--store", str(store)])


def test_a_measurement_off_a_terminal_shows_each_step_and_figure_and_a_busy_machine_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report = sample()
    report.waited = 0.5

    def measured(subject: Any, options: Any, say: Callable[[Said], None], begun: Any) -> BenchReport:
        say(Said("tiny: starting eager, 1 of 2"))
        say(Said("tiny: starting eager, 2 of 2", "detail"))
        say(Said("tiny: eager: first output in 1 s", "figure"))
        begun(report)
        return report

    measuring(monkeypatch, measured)
    ran = CliRunner().invoke(main, ["bench", "tiny", "--limit", "120"])
    lines = [
        "measuring for at most 2 min (--limit 120)",
        "tiny: starting eager, 1 of 2",
        "tiny: eager: first output in 1 s",
    ]
    assert ran.exit_code == 0 and ran.stderr.splitlines() == lines, ran.output
    assert ran.stdout.splitlines()[1].startswith("warning: busy machine: for each second of calls, threads waited 0.5")
    assert ran.stdout.count("-: not known from 3 calls; a p95 needs 20, a p99 100") == 1  # those of the trace
    assert CliRunner().invoke(main, ["bench", "tiny", "--limit", "120", "--json"]).stderr.splitlines() == lines
    assert CliRunner().invoke(main, ["bench", "tiny", "-q"]).stderr == ""
    caplog.set_level("INFO", "aotc")
    logged = CliRunner().invoke(main, ["bench", "tiny"])
    assert "starting" not in logged.stderr, "the log has every line of progress"


def measuring(monkeypatch: pytest.MonkeyPatch, measured: Callable[..., BenchReport]) -> None:
    """Let `measured` stand for the measurement of a model `tiny`."""
    subject = SimpleNamespace(spec=SimpleNamespace(name="tiny"), buckets=[])
    monkeypatch.setattr("aotc.tools.bench.bench_run.bench", measured)
    monkeypatch.setattr("aotc.cli.bench._subjects", lambda *given: iter([subject]))


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        (None, 1, "the limit of 1 s was reached (--limit)"),
    ],
)
def test_what_is_stopped_shows_what_was_measured_and_says_how_it_ended(
    number: signal.Signals | None, code: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stopped(subject: Any, options: Any, say: Any, begun: Callable[[BenchReport], None]) -> BenchReport:
        begun(sample())
        if number:
            signal.raise_signal(number)
        while True:
            signal.pause()

    measuring(monkeypatch, stopped)
    before = signal.getsignal(signal.SIGTERM)
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        page, limit = tmp_path / "page.html", "120" if number else "1"
        ran = CliRunner().invoke(main, ["bench", "tiny", "--limit", limit, "--html", str(page), "--json"])
        in_words = CliRunner().invoke(main, ["bench", "tiny", "--limit", limit])
    finally:
        signal.signal(signal.SIGINT, kept)
        signal.signal(signal.SIGTERM, before)
    assert ran.exit_code == in_words.exit_code == code
    (report,) = json.loads(ran.stdout)
    assert report["stopped"] == words and report["first_output"]["aotc"] > 0
    assert ran.stderr.splitlines()[-1] == words
    assert f"warning: {words}: this is what was measured until then" in in_words.stdout.splitlines()
    assert f"{words}: this page has what was measured until then" in Seen(page.read_text()).text


def test_the_time_of_the_calls_is_known_beforehand() -> None:
    """15 rounds of 0.2 s for two contenders and the second eager, and 0.6 s for each with 1, 2 and 4 threads. One
    that compiles is timed beside the subject."""
    options = BenchOptions(buckets=(CalledSizes("batch=1", {"batch": 1}), CalledSizes("batch=4", {"batch": 4})))
    assert options.seconds_of_calls(2) == pytest.approx(2 * (15 * 0.2 * 3 + 3 * 0.6 * 2))
    assert options.seconds_of_calls(1) == pytest.approx(2 * (15 * 0.2 * 2 + 3 * 0.6))


def test_what_the_command_line_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda name: None)
        refused = bench(tmp_path, "x", "--contenders", "eager,openvino").stderr
        assert "onnx, onnxscript, openvino is not installed: pip install" in " ".join(refused.split())
    assert "'eagre' is not one of eager, default" in bench(tmp_path, "x", "--contenders", "eagre").stderr
    assert "is not a list of numbers" in bench(tmp_path, "x", "--concurrency", "1,0").stderr
    assert "--model and --tag go with a manifest" in bench(tmp_path, "x", "--model", "y").stderr
    manifest = ROOT / "manifests" / "quickstart.yaml"
    (tmp_path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    (tmp_path / "index.json").write_text('{"schemaVersion":2,"manifests":[]}')
    (tmp_path / "blobs" / "sha256").mkdir(parents=True)
    refused = bench(tmp_path, manifest)
    assert refused.exit_code == 2
    assert f"hint: build it first: aotc build {manifest} --model quickstart --store {tmp_path}" in refused.stderr


def test_eager_and_aotc_side_by_side(quickstart_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And other runtimes, from an ONNX file. One start of each, two rounds, and a trace with a size of no bucket."""
    monkeypatch.chdir(ROOT)
    trace, page = tmp_path / "trace.jsonl", tmp_path / "page.html"
    trace.write_text('{"batch": 1, "seq": 128, "count": 3}\n{"batch": 3, "seq": 128}\n')
    ran = bench(
        *(
            quickstart_store,
            "quickstart",
            "--contenders",
            "eager,aotc,aotc-file,aotc-forked,onnxruntime,openvino",
            "--bucket",
            "batch=4,seq=128",
        ),
        *("--starts", 1, "--rounds", 2, "--seconds", 0.01, "--concurrency", "1,2", "--trace", trace, "--calls", 6),
        *("--html", page, "--json"),
    )
    assert ran.exit_code == 0, ran.output
    (report,) = json.loads(ran.stdout)
    contenders = report["contenders"]
    assert [one["failure"] for one in contenders.values()] == [""] * 6
    for name, one in contenders.items():
        (start,) = one["starts"]
        assert start["compilers"] == [] and start["difference"] < 1e-3 and start["peak_rss"] > 50 << 20
        assert report["first_output"][name] == pytest.approx(sum(start["seconds"].values()))
    seconds = contenders["aotc-forked"]["starts"][0]["seconds"]
    assert seconds["import torch"] == seconds["imports"] == 0 < seconds["load"]
    assert contenders["aotc"]["used"]["compilers"] == []
    for peer in ("onnxruntime", "openvino"):
        steps = contenders[peer]["starts"][0]["seconds"]
        assert steps["import torch"] < 0.1 < steps["imports"] + steps["load"], "its service imports no torch"
    steady = {"eager", "aotc", "onnxruntime", "openvino"}
    (bucket,) = report["buckets"]
    assert bucket["dims"] == {"batch": 4, "seq": 128}
    assert {name: len(one["rounds"]) for name, one in bucket["latencies"].items()} == dict.fromkeys(steady, 2)
    assert [one["verdict"] for one in bucket["comparisons"]] == ["too few pairs"] * 3
    assert {name: [*each] for name, each in bucket["throughput"].items()} == {one: ["1", "2"] for one in steady}
    assert bucket["failures"] == report["trace"]["failures"] == []
    replayed = report["trace"]["replayed"]
    assert {name: len(one["ms"]) for name, one in replayed.items()} == {"eager": 6, "aotc": 6}
    assert replayed["aotc"]["misses"] > 0 and replayed["aotc"]["graphs"] == 0
    assert "quickstart" in page.read_text()
