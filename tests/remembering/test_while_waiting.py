"""What is seen of a build of `aotc.compile` while somebody waits: its cost, its stages, how far it is; its priority."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotc.tools.remembering.building import while_waiting
from aotc.tools.remembering.building.build_process import ProgressWriter
from aotc.tools.remembering.building.while_waiting import (
    UsualCost,
    cost_in_words,
    progress_shown,
    raise_priority,
    read_progress,
    usual_cost,
)
from aotc.tools.remembering.memory.memory import Place


def test_a_build_says_its_stages_in_its_log_and_how_far_it_is(tmp_path: Path, capsys: Any) -> None:
    place = Place(tmp_path, "net")
    assert read_progress(place) is None
    writer = ProgressWriter(place, "cpu:x86-64-v3")
    writer.planned([SimpleNamespace(cached=None), SimpleNamespace(cached="yes"), SimpleNamespace(cached=None)])  # type: ignore[list-item]
    writer.say("compiles")
    found = read_progress(place)
    assert found is not None and (found.process, found.units, found.finished) == (os.getpid(), 2, 0)
    assert "0 of 2 units, compiles" in capsys.readouterr().out
    found.finished, found.expected = 1, 60.0
    assert found.line(found.began + 30) == "1 of 2 units, compiles (30 s of about 60 s)"
    assert found.share(found.began + 45) == 0.75
    assert found.share(found.began + 600) == 0.95
    while_waiting.progress_file(place).write_text("{")
    assert read_progress(place) is None


def test_what_a_build_costs_is_told_in_words(tmp_path: Path) -> None:
    assert usual_cost(tmp_path / "none", "net", "cpu") is None
    assert "nothing was built for this target here" in cost_in_words(None, 1, 2)
    said = cost_in_words(UsualCost(31.4, 3 << 29), 2, 4)
    assert said == "2 models on 4 cores; about 31 s and 1.5 GiB of memory for a unit, as those that were built here"


def test_a_terminal_shows_a_bar_and_a_file_nothing(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, "net")
    ProgressWriter(place, "cpu").say("compiles")
    with progress_shown(place, "1 model on 2 cores") as show:
        show()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_shown(place, "1 model on 2 cores") as show:
        show()
    told = capsys.readouterr().err
    assert "builds net: 1 model on 2 cores; its log:" in told
    assert "\r[------------------------------] compiles (0 s)" in told and "waited 0 s" in told


def test_a_notebook_shows_a_bar_in_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, "net")
    ProgressWriter(place, "cpu").say("compiles <this>")
    shown: list[str] = []
    monkeypatch.setattr(while_waiting, "_notebook_cell", lambda: shown.append)
    with progress_shown(place, "1 model") as show:
        show()
    assert '<progress value="0.000" max="1">' in shown[0] and "compiles &lt;this&gt;" in shown[0]
    assert '<progress value="1.000"' in shown[1] and "waited 0 s for the build" in shown[1]


def test_whoever_waits_raises_the_priority_of_a_build_and_of_what_it_started() -> None:
    code = "import os, subprocess, sys; os.nice(7); subprocess.run(['sleep', '60'])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        try:
            for _ in range(200):
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                if children:
                    break
                time.sleep(0.05)
            each = [process.pid, int(children[0])]
            assert [os.getpriority(os.PRIO_PROCESS, one) - os.getpriority(os.PRIO_PROCESS, 0) for one in each] == [7, 7]
            if raise_priority(process.pid):  # as root, or up to RLIMIT_NICE
                assert {os.getpriority(os.PRIO_PROCESS, one) for one in each} == {os.getpriority(os.PRIO_PROCESS, 0)}
        finally:
            os.killpg(process.pid, 9)


@pytest.mark.compile
def test_a_build_that_is_waited_for_has_the_program_s_priority_and_tells_its_stages(program: Any) -> None:
    told = program.run(
        "import threading, time\n"
        "model = aotc.compile(Net().eval())\n"
        "called(model, (2, 16))\n"
        "builds = model._remembering.context.builds\n"
        "process = builds.start()\n"
        "from aotc.tools.remembering.building.while_waiting import read_progress\n"
        "while process.poll() is None and read_progress(builds.place) is None: time.sleep(0.05)\n"
        "before = os.getpriority(os.PRIO_PROCESS, process.pid)\n"
        "waited = threading.Thread(target=model.wait); waited.start(); seen = set()\n"
        "while process.poll() is None:\n"
        "    try: seen.add(os.getpriority(os.PRIO_PROCESS, process.pid))\n"
        "    except ProcessLookupError: break\n"
        "    time.sleep(0.05)\n"
        "waited.join()\n"
        "log = builds.place.log.read_text()\n"
        "called(model, (3, 9)); built = builds.cost(); urgent = builds.start(urgent=True)\n"
        "first = os.getpriority(os.PRIO_PROCESS, urgent.pid); os.killpg(urgent.pid, 9)\n"
        "may, own = os.geteuid() == 0, os.getpriority(os.PRIO_PROCESS, 0)\n"
        "tell(model, before=before, seen=sorted(seen), stages=log, first=first, may=may, own=own, cost=built)\n"
        "os._exit(0)"  # it leaves no build behind
    )
    assert told["first"] == told["own"] < told["before"]
    if told["may"]:
        assert min(told["seen"]) == told["own"]
    assert "compiles, " in told["stages"] and "built in" in told["stages"]
    assert "how long it takes is not known" in told["log"]
    assert "of memory for a unit, as those that were built here" in told["cost"]
