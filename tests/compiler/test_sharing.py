"""Units of one build share what they measure: an equal question is measured once, and its evidence says where."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import msgspec
import pytest
from in_process import run_here
from processes import ZOO, environment, run_aotc

from aotc.compiler.autotune.picker import Picker
from aotc.compiler.autotune.shared_picks import SharedPicks, add_answers, answers_in
from aotc.compiler.executors.executor import sharing_order
from aotc.compiler.executors.local import LocalExecutor
from aotc.compiler.executors.ray.node import _sharing
from aotc.compiler.messages import Unit
from aotc.compiler.planning.key import unit_key
from aotc.compiler.workers import shared_folder
from aotc.compiler.workers.shared_folder import SharedFolder
from aotc.compiler.workers.unit_process import _caches
from aotc.machine.targets import parse_target
from aotc.manifest import read_manifest
from aotc.picks import Candidate, Pick
from aotc.store.layout.units import Shared
from aotc.tools.inspection.artifact_picks import picks_of

HERE = ["cpu:x86-64-v3", "torch", "a CPU"]
QUESTION = Pick(kind="operator", subject="mm", candidates=(), inputs=("float32[2, 2] stride [2, 1]",))
FORM = ["mm", "two candidates"]


def pick(*times: float) -> Pick:
    candidates = tuple(Candidate(f"way{number}", ms=ms) for number, ms in enumerate(times))
    return Pick(kind=QUESTION.kind, subject=QUESTION.subject, inputs=QUESTION.inputs, candidates=candidates)


# -- the folder -------------------------------------------------------------------------------------------------------


def test_an_answer_is_another_unit_s_and_names_it(tmp_path: Path) -> None:
    first, second = (SharedPicks(tmp_path, HERE, unit) for unit in ("first", "second"))
    assert second.find(FORM) is None
    first.put(FORM, pick(0.5, 0.7))
    found = second.find(FORM)
    assert found is not None and found.measured_in == "first"
    assert found.candidates == pick(0.5, 0.7).candidates
    assert first.find(FORM) is None


def test_another_question_or_another_device_has_no_answer(tmp_path: Path) -> None:
    SharedPicks(tmp_path, HERE, "first").put(FORM, pick(0.5, 0.7))
    assert SharedPicks(tmp_path, HERE, "second").find(["mm", "three candidates"]) is None
    assert SharedPicks(tmp_path, [*HERE[:2], "another CPU"], "second").find(FORM) is None


def test_what_was_measured_first_stays(tmp_path: Path) -> None:
    for unit, times in (("first", (0.5, 0.7)), ("second", (0.9, 0.8))):
        SharedPicks(tmp_path, HERE, unit).put(FORM, pick(*times))
    found = SharedPicks(tmp_path, HERE, "third").find(FORM)
    assert found is not None and found.measured_in == "first"


def test_what_somebody_spoilt_is_no_answer(tmp_path: Path) -> None:
    SharedPicks(tmp_path, HERE, "first").put(FORM, pick(0.5, 0.7))
    (path,) = tmp_path.glob("*.pick")
    path.write_bytes(path.read_bytes()[:20])
    assert SharedPicks(tmp_path, HERE, "second").find(FORM) is None


def test_units_that_ask_at_once_measure_once(tmp_path: Path) -> None:
    measured = []

    def ask(unit: str) -> None:
        shared = SharedPicks(tmp_path, HERE, unit)
        with shared.asking(QUESTION.identity):
            if shared.find(FORM) is None:
                measured.append(unit)
                shared.put(FORM, pick(0.5, 0.7))

    threads = [threading.Thread(target=ask, args=(f"unit {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(measured) == 1


def test_two_that_ask_within_each_other_s_question_do_not_wait_in_a_circle(tmp_path: Path) -> None:
    both_hold, done = threading.Barrier(2, timeout=60), []

    def ask(unit: str, outer: str, inner: str) -> None:
        shared = SharedPicks(tmp_path, HERE, unit)
        with shared.asking(outer):
            both_hold.wait()
            with shared.asking(inner):
                done.append(unit)

    threads = [
        threading.Thread(target=ask, args=arguments, daemon=True)
        for arguments in (("first", "a", "b"), ("second", "b", "a"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == ["first", "second"]


KILLED = """
import sys
from pathlib import Path
from aotc.compiler.autotune.shared_picks import SharedPicks
from aotc.picks import Candidate, Pick
shared = SharedPicks(Path(sys.argv[1]), [], "killed")
pick = Pick("operator", "mm", tuple(Candidate(f"way{n}", {"text": "x" * 200}, 0.5) for n in range(2000)))
with shared.asking("question"):
    print("asking", flush=True)
    for number in range(1_000_000):
        shared.put(number, pick)
"""


def test_a_killed_unit_leaves_whole_answers_and_nobody_waiting(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asking\n"
        while len(list(tmp_path.glob("*.pick"))) < 20:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    other = SharedPicks(tmp_path, [], "other")
    with other.asking("question"):
        found = [other.find(number) for number in range(len(answers_in(tmp_path)))]
    assert len(found) >= 20
    assert all(one is not None and len(one.candidates) == 2000 for one in found)


# -- pins -------------------------------------------------------------------------------------------------------------


def test_a_locked_unit_takes_and_gives_nothing(tmp_path: Path) -> None:
    SharedPicks(tmp_path, HERE, "first").put(FORM, pick(0.5, 0.7))
    picker = Picker(locked=True, shared=SharedPicks(tmp_path, HERE, "second"))
    assert picker.find_shared(FORM) is None
    picker.keep(QUESTION, pick(0.5, 0.7).candidates, Candidate("way0"), ["another"])
    assert len(answers_in(tmp_path)) == 1


def test_what_was_taken_is_counted_apart_and_not_passed_on_as_one_s_own(tmp_path: Path) -> None:
    SharedPicks(tmp_path, HERE, "first").put(FORM, pick(0.5, 0.7))
    picker = Picker(shared=SharedPicks(tmp_path, HERE, "second"))
    found = picker.find_shared(FORM)
    assert found is not None
    picker.take_shared(found)
    picker.share(found, ["another"])
    assert (picker.pinned, len(picker.shared), picker.tuned) == (0, 1, [])
    assert len(answers_in(tmp_path)) == 1
    picker.take(found)  # the same with a pin
    assert (picker.pinned, picker.shared) == (1, [])


def test_what_was_shared_is_said_in_words() -> None:
    assert str(Shared(picks=23, kernels=1)) == "23 picks, 1 kernel"
    assert str(Shared()) == ""


def test_units_share_triton_s_cache_and_none_of_inductor_s(tmp_path: Path) -> None:
    """What Inductor keeps in its cache are answers, too, and they would be in no record."""
    executor = LocalExecutor(2)
    assert executor.shared is not None
    with executor.shared.kernels() as first, executor.shared.kernels() as second:
        one, two = _caches(tmp_path / "one", first), _caches(tmp_path / "two", second)
    assert one["TRITON_CACHE_DIR"] == two["TRITON_CACHE_DIR"]
    assert one["TORCHINDUCTOR_CACHE_DIR"] != two["TORCHINDUCTOR_CACHE_DIR"]
    assert LocalExecutor(2, share=False).shared is None
    one, two = (_caches(tmp_path / name, None) for name in ("one", "two"))
    assert one["TRITON_CACHE_DIR"] != two["TRITON_CACHE_DIR"]
    executor.close()


def test_a_cache_of_kernels_that_has_grown_large_goes_when_nobody_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "KERNELS_LIMIT", 1000)
    shared = SharedFolder()
    with shared.kernels() as first:
        (first / "kernel").mkdir(parents=True)
        (first / "kernel" / "k.cubin").write_bytes(bytes(1001))
        with shared.kernels() as second:
            assert second != first
            second.mkdir()
        with shared.kernels() as third:
            assert third == second
        assert (first / "kernel" / "k.cubin").exists()
        (second / "k.cubin").write_bytes(bytes(1001))
    assert not first.exists() and second.exists()
    with shared.kernels() as fourth:
        assert fourth != second and not second.exists(), "nobody used it any more when it had grown too large"
    shared.remove()


# -- who begins -------------------------------------------------------------------------------------------------------


def test_units_begin_after_those_that_answer_their_questions() -> None:
    spec = read_manifest(ZOO / "manifest.yaml", ["linear"]).models["linear"]
    grid = [{"batch": batch, "seq": seq} for batch in (1, 2) for seq in (128, 256)]
    units = [Unit(spec, {**sizes}, parse_target("cpu:x86-64-v3"), {}, unit_key(sizes)) for sizes in grid]
    order = [grid[index]["batch"] * grid[index]["seq"] for index in sharing_order(units)]
    assert order == [256, 128, 512, 256]
    elsewhere = Unit(spec, {**grid[0]}, parse_target("cpu:amx"), {}, unit_key({}))
    assert sharing_order([units[0], elsewhere, units[0]]) == [0, 1, 2]


# -- nodes ------------------------------------------------------------------------------------------------------------


class Known:
    """What a cluster's units have measured."""

    def __init__(self, answers: Mapping[str, bytes]) -> None:
        self.answers = dict(answers)

    def get(self) -> Mapping[str, bytes]:
        return self.answers

    def add(self, answers: Mapping[str, bytes]) -> None:
        self.answers.update(answers)


def test_a_node_s_unit_takes_what_is_known_and_adds_what_it_measures(tmp_path: Path) -> None:
    SharedPicks(tmp_path, HERE, "first").put(FORM, pick(0.5, 0.7))
    known, executor = Known(answers_in(tmp_path)), LocalExecutor(1)
    assert executor.shared is not None
    with _sharing(executor, known):
        folder = executor.shared.picks
        here = SharedPicks(folder, HERE, "second")
        assert here.find(FORM) is not None
        here.put(["another"], pick(0.1, 0.2))
    assert not folder.exists()
    add_answers(tmp_path / "next", known.answers)
    third = SharedPicks(tmp_path / "next", HERE, "third")
    assert [found and found.measured_in for found in map(third.find, (FORM, ["another"]))] == ["first", "second"]


def test_a_unit_on_a_node_runs_where_nobody_can_be_asked() -> None:
    class Unreachable(Known):
        def get(self) -> Mapping[str, bytes]:
            raise ConnectionError

        add = None  # type: ignore[assignment]

    with _sharing(LocalExecutor(1), Unreachable({})):
        pass


# -- builds -----------------------------------------------------------------------------------------------------------

MANIFEST = """
version: 1
models:
  two-layers:
    factory: pair.py:pair
    weights: frozen
    inputs:
      input: {shape: [batch, seq, 96]}
    buckets:
      - {batch: 16, seq: 1}
      - {batch: 4, seq: 4}
"""
FACTORY = """
import torch

def pair():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
"""


def run(*arguments: Any, **changes: Any) -> str:
    ran = (run_aotc if changes.keys() - {"cwd"} else run_here)(*arguments, **changes)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(shared_folder: Path) -> Path:
    """A folder with a manifest of two buckets whose matrix products are the same, its store, and the build's report."""
    folder = shared_folder / "sharing-builds"
    with filelock.FileLock(shared_folder / "sharing-builds.lock"):
        if not (folder / "report.json").exists():
            folder.mkdir()
            (folder / "two.yaml").write_text(MANIFEST)
            (folder / "pair.py").write_text(FACTORY)
            report = run("build", folder / "two.yaml", "--store", folder / "store", "--jobs", "2", "--json")
            (folder / "report.json").write_text(report)
    return folder


def units(store: Path) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(unit) for unit in picks_of("two-layers", store)]


def test_two_buckets_side_by_side_measure_each_question_once(built: Path) -> None:
    races = [(unit, race) for unit in units(built / "store") for race in unit["picks"]]
    questions = Counter(json.dumps((race["subject"], race["inputs"], race["output"])) for _, race in races)
    assert set(questions.values()) == {2}, "both buckets ask the same"
    here = [race for _, race in races if not race.get("measured_in")]
    assert len(here) == len(questions)
    evidence = {race["inputs"][1]: race["candidates"] for race in here}
    for unit, race in races:
        if other := race.get("measured_in"):
            assert other.startswith("two-layers batch=") and f"batch={unit['bucket']['batch']}" not in other
            assert race["candidates"] == evidence[race["inputs"][1]]
    report = json.loads((built / "report.json").read_text())
    assert report["shared"]["picks"] == len(questions)


def test_the_units_records_say_what_was_shared(built: Path) -> None:
    records = [json.loads(path.read_bytes()) for path in (built / "store" / ".aotc" / "units").glob("*.json")]
    taken = {record["factors"]["bucket"]["batch"]: record.get("shared", {}).get("picks", 0) for record in records}
    stored = {
        unit["bucket"]["batch"]: sum("measured_in" in race for race in unit["picks"]) for unit in units(built / "store")
    }
    assert taken == stored and sum(taken.values()) > 0


def test_a_unit_that_took_another_s_picks_repeats_from_its_own(built: Path, tmp_path: Path) -> None:
    """Byte for byte, in other folders: its picks answer everything, without the other unit."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    places = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    shown = run("build", built / "two.yaml", "--store", built / "store", "--check", "--jobs", "2", "--json", **places)
    assert [one["same"] for one in json.loads(shown)] == [True, True], shown
    assert not list((tmp_path / "tmp").glob("aotc-build-*"))
