"""The limits of `aotc.compile`: of what is remembered, of builds, and of what one process keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import finish, start
from remembered_nets import Net, Scaled

import aotc
from aotc.errors import BindError, BuildError
from aotc.store.layout.store import Store
from aotc.tools.remembering import module_changes, remembering
from aotc.tools.remembering.building import build_process, builds
from aotc.tools.remembering.building.build_process import Attempt, BuildJob
from aotc.tools.remembering.building.builds import Builds
from aotc.tools.remembering.compile_options import Options
from aotc.tools.remembering.memory import kind_index
from aotc.tools.remembering.memory.memory import Kind, Memory, Place

FACTS = {"class": "Net", "target": "cpu:x86-64-v3"}
CALL = {"ids": {"shape": [2, 16], "dtype": "int64", "low": 0, "high": 49}}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose calls are recorded, and never built."""
    monkeypatch.setattr(Builds, "start", lambda self, **given: None)
    return aotc.compile(Net().eval(), store=tmp_path, build="exit")


def call(model: Any, *sizes: int, **kwargs: Any) -> None:
    with torch.no_grad():
        for size in sizes:
            ids = torch.zeros(1, size, dtype=torch.int64)
            assert torch.equal(model(ids, **kwargs), model.module(ids, **kwargs))


def notes(model: Any) -> str:
    return "\n".join(model.explain().notes)


def memory_of(model: Any) -> Memory:
    model.explain()  # writes what is not written yet
    found = model._remembering.known.place.read()
    assert found is not None
    return found  # type: ignore[no-any-return]


def test_so_many_kinds_and_forms_are_remembered(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind_index, "MOST_KINDS", 2)
    monkeypatch.setattr(kind_index, "MOST_CALLS", 2)
    call(model, 2)
    call(model, 2, double=True)
    assert notes(model) == ""
    call(model, 2, double=1)  # a number, for which code of its own is compiled
    assert "calls of more than 2 kinds: pass a number that varies as a tensor" in notes(model)
    call(model, 3, 4, 5)
    assert "calls of more than 2 sizes: name ranges=, or pad them" in notes(model)
    assert [len(kind.calls) for kind in memory_of(model).kinds] == [2, 1]


def test_notes_are_those_of_the_module_as_it_is(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kind_index, "MOST_CALLS", 1)
    call(model, 2, 3)
    told = notes(model)
    assert "calls of more than 1 sizes" in told
    model.module.double()
    call(model, 2)
    assert notes(model) == ""
    model.module.float()
    call(model, 2)
    assert notes(model) == told
    assert caplog.text.count("calls of more than 1 sizes") == 1


def test_where_no_further_kind_is_remembered_a_number_that_varies_costs_no_look_at_the_memory(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind_index, "MOST_KINDS", 2)
    for number in (True, 1, 2):
        call(model, 2, double=number)
    monkeypatch.setattr(Place, "change", lambda *given, **more: pytest.fail("the memory was looked at"))
    monkeypatch.setattr(Place, "read", lambda *given: pytest.fail("the memory was read"))
    before = model.stats().eager
    for number in range(3, 9):
        call(model, 2, double=number)
    assert model.stats().eager == before + 6
    monkeypatch.undo()
    call(model, 3, double=True)  # of a kind that is remembered
    assert [len(kind.calls) for kind in memory_of(model).kinds] == [2, 1]


def test_a_float_that_varies_gets_code_for_three_values(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for scale in (0.5, 1.5, 0.5, 1.5):
        call(model, 2, double=scale)
    call(model, 2, double=True)  # no float
    assert notes(model) == ""
    assert [kind.calls[0]["double"] for kind in memory_of(model).kinds] == [0.5, 1.5, True]
    monkeypatch.setattr(Place, "change", lambda *given, **more: pytest.fail("the memory was looked at"))
    for step in range(5):
        call(model, 2, double=2.5 + step)
    assert model.explain().notes == (
        "`double` is a float that varies: no code is built for further values of it. Pass it as a tensor",
    )
    reasons = {form.reason: form.eager for form in model.stats().forms if "varies" in form.reason}
    assert sum(reasons.values()) == 5
    monkeypatch.undo()
    call(model, 3, double=1.5)  # of a kind that is remembered
    call(model, 3, double=3)  # of a new kind, in which no float is
    assert [len(kind.calls) for kind in memory_of(model).kinds] == [1, 2, 1, 1]


def test_a_float_of_the_module_that_varies_gets_code_for_three_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Builds, "start", lambda self, **given: None)
    model: Any = aotc.compile(Scaled().eval(), store=tmp_path, build="exit")
    x, places = torch.randn(2, 8), []
    with torch.no_grad():
        for factor in (1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 5.0, 2.0, 6.0):
            model.module.factor = factor
            assert torch.equal(model(x), model.module(x))
            places.append(model._remembering.known.place and model._remembering.known.place.name)
            assert ("`factor` is a float that varies in the module" in notes(model)) is (factor > 3)
    one, two, _, _, three, *later = places
    assert places[:5] == [one, two, one, two, three] and len({one, two, three, None}) == 4
    assert later == [None, None, two, None]


def test_what_no_manifest_holds_is_told_where_nothing_is_built_too(tmp_path: Path) -> None:
    Store.create(tmp_path)
    model: Any = aotc.compile(Net().eval(), store=tmp_path, build="never")
    call(model, 2, double=torch.Generator())
    call(model, 2)
    held, other = model.stats().forms
    assert held.reason.startswith("no manifest holds its arguments: `double` is Generator")
    assert other.reason == f'{tmp_path} has no code for this module, and build="never"'


def test_so_many_forms_are_kept_in_a_process(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembering, "MOST_FORMS", 2)
    call(model, *range(2, 9))
    assert len(model._remembering.known.runs) <= 2
    assert len(memory_of(model).kinds[0].calls) == 7


def test_a_module_that_changes_again_and_again_stays_in_eager(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_changes, "MOST_CHANGES", 2)
    state = model._remembering
    for changes in (1, 2, 3):
        call(model, changes + 1)
        assert memory_of(model).kinds[0].calls[-1]["ids"]["shape"] == [1, changes + 1]
        loaded = SimpleNamespace(artifact=SimpleNamespace(regions=[1]))
        state.known.compiled = [loaded]
        state._module.changed(loaded, BindError("other weights"))
    call(model, 2, 3)
    assert state.known.place is None and state._module.is_lost
    assert "the module changed 3 times; its calls stay in eager" in notes(model)


def test_as_many_builds_are_begun_as_were_allowed(tmp_path: Path) -> None:
    model: Any = aotc.compile(Net().eval(), store=tmp_path, build="exit", builds=1)
    call(model, 2)
    model._remembering.known.place.change(None, lambda memory: setattr(memory, "builds", 1))
    assert model._remembering.context.builds.start() is None
    assert "the limit of 1 build is reached: raise builds=, or retry=True" in notes(model)
    again: Any = aotc.compile(model.module, store=tmp_path, build="never", retry=True)
    call(again, 2)
    assert memory_of(again).builds == 0


def test_builds_that_end_without_a_result_are_given_up(tmp_path: Path) -> None:
    place = Place(tmp_path, "net")
    memory = Memory(FACTS, {}, "remembered_nets:Net", {}, kinds=[Kind({}, [CALL])], attempts=3)
    place.change(memory, lambda memory: None)
    build_process._build(
        BuildJob(str(tmp_path), "net", str(tmp_path), Memory(FACTS, {}, "remembered_nets:Net", {}), 60, 0, -1),
        place,
        memory,
        [0],
    )
    assert place.failed(0) == "3 builds in a row ended without a result; was memory short?"
    after = place.read()
    assert after is not None and (after.attempts, place.unbuilt(after)) == (0, [])


def test_a_failure_is_told_of_the_kind_that_has_it_alone(tmp_path: Path) -> None:
    kinds = {name: Kind({}, [CALL]) for name in ("net", "net-2", "net-3")}
    job = BuildJob(str(tmp_path), "net", str(tmp_path), Memory(FACTS, {}, "remembered_nets:Net", {}), 60, 0, -1)
    attempt = Attempt(job, Place(tmp_path, "net"), Memory(FACTS, {}, "", {}, kinds=[*kinds.values()]), kinds)
    assert "took more than 60 s" in attempt.failed["net"]
    tried = []

    def act(models: list[str]) -> dict[str, str]:
        tried.append(models)
        if "net-2" in models:
            raise ValueError("no such number")
        return {"net-3": "too wide"} if "net-3" in models else {}

    attempt._each([*kinds], act)
    assert tried == [[*kinds], ["net"], ["net-2"], ["net-3"]]
    assert attempt.failed.keys() == {"net-2", "net-3"}
    assert attempt.failed["net-2"].startswith("ValueError: no such number")
    assert attempt.failed["net-3"].startswith("too wide")


def test_a_build_waits_for_memory_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([1 << 30, 1 << 30, 64 << 30])
    monkeypatch.setattr(build_process, "memory_here", lambda: next(free))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    build_process.wait_for_memory("cpu", 1 << 30)
    assert next(free, None) is None

    monkeypatch.setattr(build_process, "memory_here", lambda: 1 << 30)
    with pytest.raises(BuildError, match=r"takes about .*, and 1\.0 GiB are free") as caught:
        build_process.wait_for_memory("cpu", 8 << 30, seconds=0)
    assert caught.value.fields["expected"] > 32 << 30


def background(**options: Any) -> Builds:
    """Builds in the background, of no module."""
    given = Options(None, None, "", {}, "default", "background", 60, 0, 8, False, **options)
    return Builds(given, lambda note: None, lambda place, status: None, lambda: None)


class Clock:
    """Stands for the module `time`, and makes timers that fire by it."""

    def __init__(self) -> None:
        self.now, self.timers = 0.0, list[Any]()

    def monotonic(self) -> float:
        return self.now

    def timer(self, delay: float, start: Callable[[], None]) -> Any:
        timer = SimpleNamespace(due=self.now + delay, function=start)
        timer.start, timer.cancel = partial(self.timers.append, timer), partial(self.timers.remove, timer)
        timer.is_alive = partial(self.timers.__contains__, timer)
        return timer

    def advance(self, end: float) -> None:
        while due := [each for each in self.timers if each.due <= end]:
            timer = min(due, key=lambda each: each.due)
            self.now = timer.due
            timer.cancel()
            timer.function()
        self.now = end


@pytest.mark.parametrize(
    ("forms", "begun"),
    [
        ([0.0], [3.0]),
        ([0.0, 2.0, 4.0], [7.0]),
        ([0.0, 5.0], [3.0, 8.0]),
        ([n * 2.5 for n in range(1, 15)], [32.5, 38.0]),  # from 2.5 to 35.0
    ],
)
def test_a_build_begins_3_seconds_after_the_last_new_form_and_30_after_the_first(
    monkeypatch: pytest.MonkeyPatch, forms: list[float], begun: list[float]
) -> None:
    clock, found = Clock(), list[float]()
    monkeypatch.setattr(builds, "time", clock)
    monkeypatch.setattr("threading.Timer", clock.timer)
    monkeypatch.setattr(Builds, "start", lambda self, **given: found.append(clock.now))
    of_module = background()
    for form in forms:
        clock.advance(form)
        of_module.soon()
    clock.advance(100.0)
    assert found == begun


def test_no_build_uses_the_gpu_while_the_program_runs_unless_allowed() -> None:
    def timer(**options: Any) -> Any:
        builds = background(**options)
        builds.uses_gpu = True
        builds.soon()
        found = builds._timer
        if found is not None:
            found.cancel()
        return found

    assert timer() is None
    assert timer(gpu=True) is not None


@pytest.mark.compile
def test_a_build_has_its_seconds_and_its_cores(program: Any) -> None:
    told = program.run(
        "import time\n"
        "model = aotc.compile(Net().eval(), seconds=0.5, cores=1)\n"
        "called(model, (2, 16))\n"
        "process = model._remembering.context.builds.start()\n"
        "cores = set()\n"
        "while process.poll() is None:\n"
        "    try:\n"
        "        cores.add(len(os.sched_getaffinity(process.pid)))\n"
        "    except ProcessLookupError:\n"
        "        break\n"
        "    time.sleep(0.01)\n"
        "model.wait()\n"
        "tell(model, cores=sorted(cores), started=len(os.sched_getaffinity(0)))"
    )
    assert "the build took more than 0.5 s" in told["failed"][told["name"]]
    assert told["cores"][0] == 1
    assert told["cores"][-1] == told["started"]


def test_a_build_whose_time_ends_before_it_has_begun_has_a_reason(program: Any) -> None:
    told = program.run(
        "model = aotc.compile(Net().eval(), seconds=1e-5)\ncalled(model, (2, 16))\nassert not model.wait()\ntell(model)"
    )
    assert "the build took more than 1e-05 s" in told["failed"][told["name"]]


def test_a_forked_child_records_and_would_build_by_itself(program: Any) -> None:
    told = program.run(
        "model = aotc.compile(Net().eval())\n"
        "called(model, (2, 16))\n"
        "builds = model._remembering.context.builds\n"
        "before = builds._timer\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    right = builds._timer is None and called(model, (2, 24)) and model.explain().forms == 2\n"
        "    os._exit(0 if right and builds._timer.is_alive() else 1)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "same = called(model, (2, 24))\n"
        "tell(model, same=same, status=status, waits=builds._timer is not before)\n"
        "os._exit(0)"
    )
    assert (told["status"], told["same"], told["forms"]) == (0, True, 2)


def test_report_tells_at_the_start_and_at_the_end(program: Any) -> None:
    script = program.folder / "report.py"
    script.write_text(
        "import torch, aotc\nfrom remembered_nets import Net\n"
        "model = aotc.compile(Net().eval(), build='never')\n"
        "with torch.no_grad(): model(torch.zeros(1, 4, dtype=torch.int64))\n"
        "print('called')"
    )
    ran = finish(start(script, cwd=program.folder, AOTC_STORE=str(program.store), AOTC_COMPILE="report", AOTC_LOG=""))
    lines = [line for line in ran.stderr.splitlines() if "aotc.compile: net-" in line]
    assert [("0 of 0 forms from" in line, "nothing is loaded" in line) for line in lines] == [(True, True)] * 2
    assert ran.stdout == "called\n"
