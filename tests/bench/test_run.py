"""The order of the measurements, with processes that answer at once: caches, pairs, and what a failure costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aotc.bench import run
from aotc.bench.messages import Burst, Calls, Counted, Job, Launches, Profile, SaveMega, Started, Timed, Used
from aotc.bench.report import BenchReport
from aotc.bench.run import Options, bench
from aotc.bench.session import ContenderFailed
from aotc.bench.subject import Sizes, Subject
from aotc.manifest.types import ModelSpec
from aotc.records import Signature

MS = {"eager": 2.0, "default": 1.5, "max-autotune": 1.0, "aotc": 1.0}


class Processes:
    """Every process that was started: its contender, its cache folder, and the names that are open at a time.

    Those that are `failing` do not start; one that `breaks` ends in this of its requests to call.
    """

    def __init__(self, *failing: str, **breaks: int) -> None:
        self.failing, self.breaks = failing, breaks
        self.started: list[tuple[str, Path]] = []
        self.open: list[str] = []

    def session(self, job: Job, caches: Path, work: Path) -> Any:
        return Session(self, job, caches)


class Session:
    """Calls take as long as MS says, in every round half as much more: the machine becomes slower."""

    def __init__(self, processes: Processes, job: Job, caches: Path) -> None:
        self.processes, self.name, self.calls = processes, job.contender, 0
        processes.started.append((job.contender, caches))
        if job.contender in processes.failing:
            raise ContenderFailed("RuntimeError: it fails")
        processes.open.append(job.contender)
        first = {"load": 0.1, "first call": MS.get(job.contender, 1.0)}
        self.started = Started({"import torch": 1.0, **first}, (), 0.0, 1 << 20)

    def ask(self, request: Any, expected: type) -> Any:
        match request:
            case Calls(count=count):
                self.calls += 1
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


SUBJECT = Subject(
    ModelSpec("tiny", "models:Tiny", {}, ({"batch": 1},)),
    Path(),
    "s#tiny",
    "sha256:0",
    "cpu:x86-64-v3",
    Signature((), ()),
)


def measured(monkeypatch: pytest.MonkeyPatch, processes: Processes, **options: Any) -> BenchReport:
    monkeypatch.setattr(run, "Session", processes.session)
    monkeypatch.setattr(run._Bench, "_prepare", lambda self: None)
    report = bench(SUBJECT, Options(buckets=(Sizes("batch=1", {"batch": 1}),), threads=(1, 2), **options))
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
    assert [*bucket.latencies] == ["eager", "default", "aotc"]
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


def test_an_interruption_loses_nothing_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Any, control: Any) -> None:
        raise KeyboardInterrupt

    begun: list[BenchReport] = []
    processes = Processes()
    monkeypatch.setattr(run, "Session", processes.session)
    monkeypatch.setattr(run._Bench, "_prepare", lambda self: None)
    monkeypatch.setattr(run._Bench, "_time_rounds", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench(SUBJECT, Options(("eager", "aotc"), starts=2), begun=begun.append)
    assert [len(one.starts) for one in begun[0].started] == [2, 2]
    assert processes.open == []
