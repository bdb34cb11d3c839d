"""The order of the measurements, with processes that answer at once: caches, pairs, and what a failure costs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from aotc.cli import bench as cli
from aotc.cli import main
from aotc.manifest.types import ModelSpec
from aotc.records import Signature
from aotc.tools.bench import bench_run, contender_process
from aotc.tools.bench.bench_page import render_page
from aotc.tools.bench.bench_run import BenchOptions, bench
from aotc.tools.bench.bench_setup import BenchSetup
from aotc.tools.bench.contender_messages import (
    Burst,
    Calls,
    ContenderJob,
    Counted,
    Launches,
    Profile,
    SaveMega,
    Started,
    Timed,
    Used,
)
from aotc.tools.bench.contender_process import ContenderFailed
from aotc.tools.bench.contenders import CONTENDERS, Attachment
from aotc.tools.bench.measurements import BenchReport, ContenderMeasurements
from aotc.tools.bench.subject import BenchSubject, CalledSizes

MS = {"eager": 2.0, "default": 1.5, "max-autotune": 1.0, "aotc": 1.0, "onnxruntime": 1.0, "openvino": 1.0}


class Processes:
    """Every process that was started: its contender, its cache folder, and the names that are open at a time.

    Those that are `failing` do not start; one that `breaks` ends in this of its requests to call.
    """

    def __init__(self, *failing: str, **breaks: int) -> None:
        self.failing, self.breaks = failing, breaks
        self.started: list[tuple[str, Path]] = []
        self.open: list[str] = []

    def session(self, job: ContenderJob, caches: Path, work: Path, waiting: Callable[[float], None]) -> Any:
        return Session(self, job, caches)


class Session:
    """Calls take as long as MS says, in every round of a bucket half as much more: the machine becomes slower."""

    def __init__(self, processes: Processes, job: ContenderJob, caches: Path) -> None:
        self.processes, self.name, self.calls = processes, job.contender, 0
        processes.started.append((job.contender, caches))
        if job.contender in processes.failing:
            raise ContenderFailed("RuntimeError: it fails")
        processes.open.append(job.contender)
        first = {"load": 0.1, "first call": MS.get(job.contender, 1.0)}
        self.started = Started({"import torch": 1.0, **first}, (), 0.0, 1 << 20)

    def ask(self, request: Any, expected: type) -> Any:
        match request:
            case Calls(count=count, warm=warm):
                self.calls = self.calls + 1 if warm else 1  # the first call of a bucket does not warm up
                if self.calls == self.processes.breaks.get(self.name):
                    raise ContenderFailed("its process ended with status -9")
                return Timed((MS[self.name] * 1.5**self.calls,) * count)
            case Burst(threads=threads):
                if self.name == "default" and threads > 1:
                    raise ContenderFailed("AssertionError: another thread")
                return Counted(10 * threads, 1.0)
            case Profile():
                return Launches(None, None)
            case SaveMega(path):
                Path(path).write_bytes(b"cache")
                return Timed(())
        return Used(1, None, 0, (), 0)

    def close(self) -> None:
        self.processes.open.remove(self.name)

    kill = close


SUBJECT = BenchSubject(
    ModelSpec("tiny", "models:Tiny", {}, ({"batch": 1},)),
    Path(),
    "s#tiny",
    "sha256:0",
    "cpu:x86-64-v3",
    Signature((), ()),
)


def measured(monkeypatch: pytest.MonkeyPatch, processes: Processes, **options: Any) -> BenchReport:
    monkeypatch.setattr(bench_run, "ContenderProcess", processes.session)
    monkeypatch.setattr(bench_run._Bench, "_prepare", lambda self: None)
    report = bench(SUBJECT, BenchOptions(buckets=(CalledSizes("batch=1", {"batch": 1}),), threads=(1, 2), **options))
    assert processes.open == []
    return report


def test_each_contender_starts_from_its_own_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes()
    names = ("default-warm", "default-mega", "aotc")
    measured(monkeypatch, processes, contenders=names, starts=3, rounds=0)
    caches: dict[str, list[Path]] = {}
    for name, folder in processes.started:
        caches.setdefault(name, []).append(folder)
    starts = {name: len(each) for name, each in caches.items()}
    assert starts == {"default": 1, "default-warm": 1, "default-mega": 1, "aotc": 3}
    assert caches["default-warm"] == caches["default"] != caches["default-mega"]
    assert len({*caches["aotc"]}) == 3


def test_what_fails_is_reported_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, Processes("max-autotune"), starts=6, rounds=6)
    failures = {name: one.failure for name, one in report.contenders.items() if one.failure}
    assert failures == {
        "max-autotune": "RuntimeError: it fails",
        "max-autotune-warm": "max-autotune failed, from whose caches this starts",
        "max-autotune-mega": "max-autotune failed, from whose caches this starts",
    }
    (bucket,) = report.buckets
    assert {*bucket.latencies} == {"eager", "default", "aotc"}
    assert bucket.failures == ["default, 2 at a time: AssertionError: another thread"]
    assert {name: [*each] for name, each in bucket.throughput.items()} == {
        "eager": [1, 2],
        "default": [1],
        "aotc": [1, 2],
    }


def test_a_machine_that_becomes_slower_changes_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, Processes(), contenders=("eager", "default", "aotc"), starts=6, rounds=8)
    (bucket,) = report.buckets
    assert bucket.noise_floor == 1.0
    found = {one.other: (one.ratio, one.low, one.high, one.pairs, one.verdict) for one in bucket.comparisons}
    assert found == {"eager": (2.0, 2.0, 2.0, 8, "faster"), "default": (1.5, 1.5, 1.5, 8, "faster")}
    assert {one.other: one.verdict for one in report.start_comparisons()} == {
        "eager": "faster",
        "default": "too few pairs",
    }


def test_a_process_that_ends_amid_the_rounds_keeps_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(eager=5)  # of each process: two requests warm up, then come the rounds
    report = measured(monkeypatch, processes, contenders=("eager", "aotc"), starts=1, rounds=8)
    (bucket,) = report.buckets
    assert {name: len(one.rounds) for name, one in bucket.latencies.items()} == {"eager": 2, "aotc": 8}
    assert "eager, round 3: its process ended with status -9" in bucket.failures
    assert [one.verdict for one in bucket.comparisons] == ["too few pairs"]


def test_what_takes_seconds_is_measured_before_a_compiler_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only the subject's process stays beside that of the contender that is measured."""
    processes, seen = Processes(), list[tuple[str, list[str]]]()
    monkeypatch.setattr(
        bench_run._Bench, "_measure_threads", lambda self, names: seen.append((",".join(names), [*self.sessions]))
    )
    measured(monkeypatch, processes, starts=1, rounds=1)
    assert seen == [
        ("eager,aotc", ["eager", "aotc"]),
        ("default", ["aotc", "default"]),
        ("max-autotune", ["aotc", "max-autotune"]),
    ]
    assert [name for name, _ in processes.started][:5] == ["eager", "aotc", "aotc-file", "aotc-forked", "eager"]


def test_of_six_starts_two_come_before_the_calls_and_the_others_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of time then ends the starts, of which fewer give a figure without a verdict, and not the calls."""
    processes, calls_after = Processes(), list[int]()
    timing = bench_run._Bench._measure_calls

    def noted(self: Any, names: Any) -> None:
        calls_after.append(len(processes.started))
        timing(self, names)

    monkeypatch.setattr(bench_run._Bench, "_measure_calls", noted)
    report = measured(monkeypatch, processes, contenders=("eager", "aotc", "default"), starts=6, rounds=6)
    names = [name for name, _ in processes.started]
    assert names[:4] == ["eager", "aotc", "aotc", "eager"]
    assert names[4:6] == ["eager", "default"], "the second process of eager, and the compiler"
    assert calls_after == [4, 6]
    assert names[6:] == ["eager", "aotc", "aotc", "eager"] * 2
    assert {name: len(one.starts) for name, one in report.contenders.items()} == {"eager": 6, "aotc": 6, "default": 1}
    assert all(one.verdict != "too few pairs" for one in report.buckets[0].comparisons)


def test_a_long_start_says_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process answers after a second, and its parent says each tenth of one that it waits."""
    worker = tmp_path / "worker.py"
    worker.write_text('import time; time.sleep(1); print(\'{"type": "failed", "message": "no"}\', flush=True)')
    monkeypatch.setattr(contender_process.measure_worker, "__file__", str(worker))
    monkeypatch.setattr(contender_process, "PERIOD", 0.1)
    job = ContenderJob("eager", SUBJECT.spec, "", Attachment("", "", "cpu", "", ""), (), "")
    waited: list[float] = []
    with pytest.raises(ContenderFailed, match="no"):
        contender_process.ContenderProcess(job, tmp_path / "caches", tmp_path / "work", waited.append)
    assert len(waited) >= 5 and waited == sorted(waited) and waited[0] >= 0.1


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (
            {"import torch": 3.0, "model": 12.0, "load": 0.1, "first call": 3.0},
            ["12.00 s construct", "(aotc-file: 5.20 s)"],
        ),
        (
            {"import torch": 3.0, "device": 1.0, "load": 0.1, "first call": 1.0},
            ["4.00 s are of the process", "aotc.prepare"],
        ),
        ({"import torch": 1.0, "model": 1.0, "load": 10.0, "first call": 3.0}, []),
    ],
)
def test_a_slow_start_says_what_shortens_it(seconds: dict[str, float], said: list[str]) -> None:
    starts = {"aotc": [Started(seconds, (), 0.0, 1)], "aotc-file": [Started({"load": 5.2}, (), 0.0, 1)]}
    contenders = {name: ContenderMeasurements(name, name, found) for name, found in starts.items()}
    text = "\n".join(BenchReport("m", "s#m", "", "", {}, {}, contenders, []).faster_starts())
    assert all(part in text for part in said) and (said or not text)


@pytest.mark.parametrize(
    ("target", "failures", "notes"),
    [
        ("cpu:x86-64-v3", {"openvino": "the model cannot be exported as ONNX: RuntimeError: no such operator"}, []),
        ("cuda:sm_90", {}, ["openvino: measured for CPUs only"]),
    ],
)
def test_where_a_peer_cannot_run_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, target: str, failures: dict[str, str], notes: list[str]
) -> None:
    answer = BenchSetup(onnx_error="RuntimeError: no such operator")
    monkeypatch.setattr(bench_run, "prepared", lambda *given: (None, answer))
    monkeypatch.setattr(bench_run, "ContenderProcess", Processes().session)
    subject = SUBJECT._replace(target=target)
    options = BenchOptions(("eager", "openvino"), (CalledSizes("batch=1", {"batch": 1}),), starts=1, rounds=0)
    report = bench(subject, options)
    assert {name: one.failure for name, one in report.contenders.items() if one.failure} == failures
    assert len(report.contenders["eager"].starts) == 1 and report.notes == notes


EACH = [(name,) for name in CONTENDERS]


@pytest.mark.parametrize("names", [*EACH, ("default-warm", "aotc-file"), ("default", "max-autotune")], ids=",".join)
def test_any_choice_of_contenders_is_measured_and_shown(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = measured(monkeypatch, Processes(), contenders=names, starts=1, rounds=6)
    shown = show(report, capsys)
    (bucket,) = report.buckets
    steady = [name for name in report.contenders if CONTENDERS[name].steady]
    assert {*bucket.latencies} == {*bucket.throughput} == {*steady}
    assert len(bucket.comparisons) == max(0, len(steady) - 1)
    assert all(one.label in shown for one in report.contenders.values())


@pytest.mark.parametrize("place", range(1, 51, 4))
def test_a_report_can_be_shown_wherever_it_is_stopped(
    place: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At any of 50 starts and requests: 31 of the contenders that do not compile, 19 of the one that does."""
    begun: list[BenchReport] = []
    processes, places, ask = Processes(), itertools.count(1), Session.ask

    def stop() -> None:
        if next(places) == place:
            raise KeyboardInterrupt

    monkeypatch.setattr(Session, "ask", lambda self, *request: (stop(), ask(self, *request))[1])
    monkeypatch.setattr(bench_run, "ContenderProcess", lambda *job: (stop(), processes.session(*job))[1])
    monkeypatch.setattr(bench_run._Bench, "_prepare", lambda self: None)
    options = BenchOptions(
        ("eager", "default", "aotc"), (CalledSizes("batch=1", {"batch": 1}),), starts=1, rounds=6, threads=(1,)
    )
    with pytest.raises(KeyboardInterrupt):
        bench(SUBJECT, options, begun=begun.append)
    assert processes.open == []
    begun[0].stopped = "interrupted"
    shown = show(begun[0], capsys)
    assert "warning: interrupted: this is what was measured until then" in shown
    assert ("torch.compile" in shown) == (place > 32)
    rounds = begun[0].buckets[0].latencies
    assert len({len(one.rounds) for name, one in rounds.items() if name != "default"}) <= 1
    assert (place > 31) <= (len(rounds["aotc"].rounds) == 6 if rounds else False)


def show(report: BenchReport, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints of a report; its JSON and its page are made, too."""
    with click.Context(main):
        cli._show(report)
    assert json.loads(json.dumps(cli._document(report)))["stopped"] == report.stopped
    assert report.model in render_page([report])
    return capsys.readouterr().out
