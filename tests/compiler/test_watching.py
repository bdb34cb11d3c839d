"""What a person sees of a build, what its trace holds, and how many units a machine takes at a time."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from pathlib import Path

import pytest
from doctoring import artifact_of
from msgspec.structs import replace
from processes import ZOO
from rich.console import Console

from aotc.cli.build_output import show_unmatched_picks, totals
from aotc.cli.progress.build_progress import LineProgress
from aotc.compiler.autotune.shared_picks import SharedPicks
from aotc.compiler.build_report import Event, Outcome
from aotc.compiler.executors import local
from aotc.compiler.executors.local import COMPILE_THREADS, LocalExecutor, jobs_for, memory_of, targets_of_many
from aotc.compiler.messages import INDUCTOR, STAGE, WAITING, Doing, Pins, Span, StageCosts, Unit, wait_here
from aotc.compiler.planning.cache_lookup import PlannedUnit
from aotc.compiler.planning.estimate import Estimate, estimate, remaining
from aotc.compiler.planning.key import unit_key
from aotc.compiler.toolchain.precompiled_headers import ENOUGH_UNITS
from aotc.compiler.workers.build_trace import BuildTrace
from aotc.machine import locks, resources
from aotc.machine.targets import parse_target
from aotc.manifest import read_manifest
from aotc.picks import PICKS_SCHEMA_VERSION, Candidate, Pick, PickFile, UnitPicks
from aotc.records import Bucket
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitCost, unit_costs

GIB = 1 << 30


def unit(batch: int = 2, state_bytes: int = 0, target: str = "cpu:x86-64-v3") -> Unit:
    spec = read_manifest(ZOO / "manifest.yaml", ["linear"]).models["linear"]
    return Unit(spec, {"batch": batch}, parse_target(target), {}, unit_key({"b": batch}), state_bytes=state_bytes)


# -- stages -----------------------------------------------------------------------------------------------------------


def test_a_stage_has_its_time_its_memory_and_its_parts() -> None:
    costs = StageCosts(began=100.0)
    for progress in (
        Doing("export"),
        Span("export", STAGE, 100.5, 1.5, memory=GIB),
        Doing("compile", "lowering"),
        Span("compiling wrapper", "compiling", 103.0, 2.0),
        Span("compiling kernel", "compiling", 103.5, 1.0),
        Span("Scheduler.__init__", INDUCTOR, 102.5, 0.2),
        Span("compile", STAGE, 102.0, 4.0, memory=2 * GIB),
    ):
        costs.add(progress)
    export, compiled = costs.stages["export"], costs.stages["compile"]
    assert (export.began, export.seconds, export.memory, export.parts) == (0.5, 1.5, GIB, {})
    assert (compiled.began, compiled.seconds, compiled.memory) == (2.0, 4.0, 2 * GIB)
    assert compiled.parts == {"compiling": 3.0}


# -- the trace --------------------------------------------------------------------------------------------------------


def test_a_trace_shows_each_unit_on_its_host_with_what_it_did_inside_its_stages(tmp_path: Path) -> None:
    trace = BuildTrace()
    first, second = unit(2), unit(3)
    inner = Span("autotune mm", "autotuning", 10.25, 0.5, "node-a", 7, 7)
    for event in (
        Event(first, span=inner),
        Event(first, span=Span("compile", STAGE, 10.0, 2.0, "node-a", 7, 7, 3 * GIB)),
        Event(second, span=Span("compile", STAGE, 10.0, 1.0, "node-b", 7, 7)),
        Event(second, doing=Doing("compile")),
    ):
        trace.add(event)
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    hosts = {one["args"]["name"]: one["pid"] for one in events if one["name"] == "process_name"}
    slices = [one for one in events if one["ph"] == "X"]
    assert [(one["name"], one["pid"], one["ts"], one["dur"]) for one in slices] == [
        ("compile", hosts["node-a"], 10_000_000, 2_000_000),
        ("compile", hosts["node-b"], 10_000_000, 1_000_000),
        ("autotune mm", hosts["node-a"], 10_250_000, 500_000),
    ]
    assert {one["args"]["unit"] for one in slices if one["pid"] == hosts["node-b"]} == {second.name}
    assert slices[0]["args"]["peak memory, MiB"] == 3 * 1024
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    assert named == {(one["pid"], one["tid"]) for one in slices}


def test_a_trace_shows_where_a_unit_waited(tmp_path: Path) -> None:
    """For a turn, before it has a process: in the lane of its stages. For a core: a number of the stage."""
    trace = BuildTrace()
    for span in (
        Span("wait for a turn: --jobs", WAITING, 1.0, 9.0, "node-a"),
        Span("wait for the GPU", WAITING, 10.5, 0.25, "node-a", 7, 8),
        Span("compile", STAGE, 10.0, 2.0, "node-a", 7, 7, core=1.5),
        Span("smoke run", STAGE, 12.0, 2.0, "node-a", 9, 9),
    ):
        trace.add(Event(unit(2), span=span))
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = {one["name"]: one for one in events if one["ph"] == "X"}
    lanes = {name: one["tid"] for name, one in slices.items()}
    assert lanes == {"wait for a turn: --jobs": 7, "wait for the GPU": 8, "compile": 7, "smoke run": 9}
    assert [name for name, one in slices.items() if one["cat"] == "waiting"] == [
        "wait for a turn: --jobs",
        "wait for the GPU",
    ]
    assert slices["compile"]["args"]["waited for a core, s"] == 1.5


def test_a_unit_tells_of_its_wait_for_the_answer_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "SHORTEST", 0.0)
    first, second = (SharedPicks(tmp_path, "cpu", name) for name in ("first", "second"))
    heard: list[tuple[str, float, float]] = []

    def ask() -> None:
        with second.asking("mm"):
            pass

    with locks.listening(lambda *wait: heard.append(wait)):
        with first.asking("mm"):
            heard.clear()
            asking = threading.Thread(target=ask)
            asking.start()
            while (frame := sys._current_frames().get(asking.ident or 0)) and frame.f_code.co_name != "lock":
                time.sleep(0.01)
            released = time.time()
        asking.join()
    ((what, began, ended),) = heard
    assert what == "for another unit, which measures the same" and released <= ended
    span = wait_here(what, began, ended)
    assert (span.name, span.kind) == (f"wait {what}", WAITING)


# -- remaining time ---------------------------------------------------------------------------------------------------


def test_what_remains_is_shared_among_the_slots_and_no_less_than_the_longest() -> None:
    expected = {"a": 10.0, "b": 10.0, "c": 40.0}
    assert remaining(expected, ["a", "b"], {}, [], slots=1) == 20
    assert remaining(expected, ["a", "b"], {}, [], slots=2) == 10
    assert remaining(expected, ["a", "b", "c"], {}, [], slots=4) == 40
    assert remaining(expected, ["a"], {"c": 15.0}, [], slots=1) == 35
    assert remaining(expected, [], {"c": 60.0}, [], slots=1) == 0


def test_a_unit_nobody_knows_takes_as_long_as_those_that_are_done() -> None:
    assert remaining({}, ["new", "other"], {}, [3.0, 5.0], slots=1) == 8
    assert remaining({}, ["new"], {}, [], slots=1) is None


def _blob_bytes(store: Store, bucket: Bucket) -> int:
    """What `linear` at this bucket takes in the store."""
    (variant,) = (one for one in artifact_of(store, "linear").variants if one.bucket == bucket)
    return sum(store.blobs.size(digest) or 0 for digest in {file.blob for file in variant.each_file()})


def test_units_cost_what_they_or_their_like_did_before(zoo_store: Path) -> None:
    store = Store.open(zoo_store)
    (same,) = (cost for cost in unit_costs(store) if cost.model == "linear" and cost.bucket == {"batch": 2})
    like = [cost for cost in unit_costs(store) if cost.model == "linear"]
    assert len(like) == 2
    known, new = unit(2, target=same.target), unit(32, target=same.target)
    found = estimate(store, [PlannedUnit(one, None, ()) for one in (known, new)])
    assert found.seconds[known.name] == same.seconds
    assert found.seconds[new.name] == pytest.approx(sum(cost.seconds for cost in like) / 2)
    assert found.memory[new.name] == max(cost.memory for cost in like) > 0
    blobs = {str(cost.bucket): _blob_bytes(store, cost.bucket) for cost in like}
    assert found.disk[known.name] == blobs[str(same.bucket)] > 10_000 and found.weights == 0
    assert found.disk[new.name] == pytest.approx(sum(blobs.values()) / 2, abs=1)
    other = "cpu:x86-64-v4" if same.target == "cpu:x86-64-v3" else "cpu:x86-64-v3"
    assert estimate(store, [PlannedUnit(unit(2, target=other), None, ())]) == Estimate()  # another target says nothing


def test_a_region_costs_what_it_did_and_not_what_others_of_the_model_did(
    regions_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"blocks.0", "gates.0"} <= {cost.region for cost in unit_costs(Store.open(regions_store))}
    one = unit(2)
    costs = [
        UnitCost("linear", region, one.bucket, one.target.name, "2026-01-01T00:00:00Z", seconds, int(seconds) * GIB)
        for region, seconds in (("layers.0", 60.0), ("gates.0", 5.0))
    ]
    monkeypatch.setattr("aotc.compiler.planning.estimate.unit_costs", lambda store: costs)
    units = [replace(one, region=region) for region in ("layers.0", "gates.0", "head")]
    found = estimate(Store.open(regions_store), [PlannedUnit(unit, None, ()) for unit in units])
    assert list(found.seconds.values()) == [60.0, 5.0]
    assert list(found.memory.values()) == [60 * GIB, 5 * GIB]


def test_the_weights_that_buckets_share_are_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, other = unit(2), unit(3)
    costs = [
        UnitCost("linear", "", part.bucket, part.target.name, "2026-01-01T00:00:00Z", 1.0, 0, size=100, mapped=mapped)
        for part, mapped in ((one, 5000), (other, 4000))
    ]
    monkeypatch.setattr("aotc.compiler.planning.estimate.unit_costs", lambda store: costs)
    known = estimate(Store.create(tmp_path / "store"), [PlannedUnit(part, None, ()) for part in (one, other)])
    assert known.disk == {one.name: 100, other.name: 100} and known.weights == 5000


def test_a_plan_s_totals_give_the_disk_and_say_what_is_unknown() -> None:
    units = [unit(2), unit(3), unit(4)]
    planned = [PlannedUnit(one, None, ()) for one in units]
    seconds, disk = {one.name: 10.0 for one in units}, {one.name: 2 << 20 for one in units}
    whole = totals(planned, Estimate(seconds, {}, disk, 1 << 20))
    assert whole.endswith(", about 30 s with 1 at a time, 7.0 MiB of disk")
    del disk[units[0].name]
    part = totals(planned, Estimate(seconds, {}, disk))
    assert part.endswith(", 4.0 MiB of disk and an unknown amount for 1 of the units")
    assert totals(planned, Estimate()).endswith(", time and disk unknown: no such unit was built before")
    assert "unknown" not in totals([], Estimate())


def test_a_file_of_picks_for_other_units_is_warned_about_with_both(capsys: pytest.CaptureFixture[str]) -> None:
    here = unit(2)
    decided = Pick("operator", "mm", (Candidate("mm", {}, 0.1),))
    other = UnitPicks("gpt", {"rows": 8}, "cuda:sm_90", "2.13.0", "H200", (decided,))
    file = PickFile(PICKS_SCHEMA_VERSION, (other,))
    show_unmatched_picks([PlannedUnit(here, None, ())], file)
    shown = capsys.readouterr().err
    assert "warning: no pick of the file is for a unit of this build: all decisions are measured\n" in shown
    assert "picks for: gpt rows=8 cuda:sm_90\n" in shown and f"units here: {here.name}\n" in shown
    pinned = replace(here, pins=Pins(other))
    show_unmatched_picks([PlannedUnit(here, None, ()), PlannedUnit(pinned, None, ())], file)
    show_unmatched_picks([PlannedUnit(here, None, ())], None)
    assert capsys.readouterr().err == ""


def test_lines_say_what_is_done_and_how_long_the_rest_takes() -> None:
    first, second = unit(2), unit(3)
    planned = [PlannedUnit(one, None, ()) for one in (first, second)]
    console = Console(file=io.StringIO(), width=200)
    progress = LineProgress(console, planned, 1, Estimate({second.name: 300.0}))
    progress.show(Event(first, doing=Doing("compile")))
    progress.show(Event(first, doing=Doing("compile", "autotuning operator 7 of 23")))
    assert progress.running[first.name][1] == "compile: autotuning operator 7 of 23"
    done = Outcome("linear", "batch=2", first.target.name, "built", 12.0)
    progress.show(Event(first, outcome=done))
    progress.show(Event(second, outcome=replace(done, bucket="batch=3")))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        f"{first.name}: compile",
        f"[1/2] {first.name}: built in 12.0 s",
        "1 of 2 units left, about 5 min",
        f"[2/2] {second.name}: built in 12.0 s",
    ]


def test_a_unit_that_takes_longer_than_expected_leaves_no_time_to_tell() -> None:
    one = unit(2)
    progress = LineProgress(Console(file=io.StringIO()), [PlannedUnit(one, None, ())], 1, Estimate({one.name: 1e-3}))
    progress.show(Event(one, doing=Doing("compile")))
    time.sleep(2e-3)
    assert progress.left() == "1 of 1 unit left"


# -- jobs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "cores_here", lambda: 8)
    monkeypatch.setattr(local, "memory_here", lambda: 16 * GIB)


@pytest.mark.usefixtures("machine")
def test_jobs_follow_cores_memory_and_units() -> None:
    many = [unit(batch) for batch in range(1, 33)]
    assert jobs_for(many) == 8
    assert jobs_for(many[:3]) == 3
    assert jobs_for(many, 16) == 16
    assert jobs_for(many[:3], 16) == 3, "each has a third of the cores to compile on"
    assert jobs_for([]) == jobs_for([], 16) == 1
    large = [*many, unit(64, state_bytes=GIB)]
    assert jobs_for(large) == 16 * GIB // memory_of(large[-1]) < 8
    assert jobs_for(many, None, {many[3].name: 4 * GIB}) == 4
    assert jobs_for([unit(1, state_bytes=100 * GIB)]) == 1


def test_headers_are_precompiled_where_many_units_have_a_cpu_target() -> None:
    many = [unit(batch) for batch in range(ENOUGH_UNITS)]
    few = [unit(batch, target="cpu:x86-64-v4") for batch in range(ENOUGH_UNITS - 1)]
    assert targets_of_many([*many, *few]) == ["cpu:x86-64-v3"]
    assert targets_of_many([unit(batch, target="cuda:sm_90") for batch in range(ENOUGH_UNITS)]) == []


@pytest.mark.usefixtures("machine")
def test_jobs_share_the_cores_that_inductor_compiles_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(COMPILE_THREADS, raising=False)
    threads = {jobs: LocalExecutor(jobs)._processes._variables[COMPILE_THREADS] for jobs in (1, 3, 8, 16)}
    assert threads == {1: "8", 3: "3", 8: "1", 16: "1"}
    monkeypatch.setenv(COMPILE_THREADS, "5")
    assert COMPILE_THREADS not in LocalExecutor(2)._processes._variables


def test_a_container_limits_cores_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of control groups, version 2: the group's own limits, and those of the groups around it."""
    proc, group = tmp_path / "proc", tmp_path / "cgroup" / "pod" / "build"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/pod/build\n")
    (proc / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")
    monkeypatch.setattr(resources, "_PROC", proc)
    monkeypatch.setattr(resources, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    assert resources.cores_here() == 16
    assert resources.memory_here() == 32 * GIB
    (group / "cpu.max").write_text("max 100000\n")
    (group.parent / "cpu.max").write_text("250000 100000\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{8 * GIB}\n")
    (group.parent / "memory.current").write_text(f"{6 * GIB}\n")
    (group.parent / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    assert resources.cores_here() == 2
    assert resources.memory_here() == 3 * GIB
