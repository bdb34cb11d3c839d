"""Builds that are stopped half-way, and builds that meet: no orphan, no half-published artifact, no work done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import filelock
import pytest
import yaml
from doctoring import artifact_of, copy_store
from in_process import plan_here, run_here
from processes import ZOO, finish, processes_that_name, start, wait_until_none_names

from aotc.cli.build import BuildOptions, Shown
from aotc.compiler.executors.executor import side_by_side
from aotc.compiler.messages import DEFAULTS
from aotc.manifest import read_manifest
from aotc.store.layout.store import Store

SLOW = """
import time
import torch

class Slow(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        time.sleep(60)
        return super().forward(x)
"""


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """The folder of the build's temporary files: what runs for the build has it in its command line."""
    folder = tmp_path / "temporary-of-the-build"
    folder.mkdir()
    yield folder
    assert processes_that_name("aotc.compiler", f"TMPDIR={folder}") == []


def start_build(manifest: Path, store: Path, temporary: Path, *more: str) -> subprocess.Popen[str]:
    return start("-m", "aotc", "build", manifest, "--store", store, "--jobs", "1", *more, TMPDIR=str(temporary))


def wait_for_line(build: subprocess.Popen[str], start: str) -> None:
    assert build.stderr is not None
    for line in build.stderr:
        if line.startswith(start):
            return
    pytest.fail(f"the build ended before it said {start!r}")


def plan(manifest: Path, store: Path) -> list[bool]:
    return [plan.cached is not None for plan in plan_here(read_manifest(manifest), store)]


def add_models(manifest: Path, buckets: object, **more: dict[str, object]) -> None:
    """Put a model that fails before the manifest's own, and `more` behind it, each with its changes to that one."""
    linear = {**yaml.safe_load(manifest.read_text())["models"]["linear"], "buckets": buckets}
    wrong = {**linear, "inputs": {"x": {"shape": ["batch", 9]}}, "buckets": [{"batch": 4}]}
    models = {"wrong": wrong, "linear": linear, **{name: {**linear, **changes} for name, changes in more.items()}}
    manifest.write_text(yaml.safe_dump({"version": 1, "models": models}, sort_keys=False))


def assert_says_why_the_wrong_one_failed(said: str) -> None:
    assert "failed: wrong batch=4 " in said and "mat1 and mat2 shapes cannot be multiplied" in said
    assert said.count("\nfailed: ") == 1, said


def test_an_interrupted_build_ends_every_process_keeps_finished_units_and_says_why_others_failed(
    manifest: Path, tmp_path: Path, temporary: Path
) -> None:
    """By SIGTERM, which raises what Ctrl-C does."""
    (manifest.parent / "slow.py").write_text(SLOW)
    add_models(manifest, [{"batch": 2}], slow={"factory": "slow.py:Slow", "buckets": [{"batch": 5}]})
    store = tmp_path / "store"
    build = start_build(manifest, store, temporary, "--json")
    wait_for_line(build, "[2/3] ")
    wait_for_line(build, "slow batch=5 ")
    assert processes_that_name("aotc.compiler", f"TMPDIR={temporary}")
    began = time.monotonic()
    build.send_signal(signal.SIGTERM)
    ran = finish(build)
    assert time.monotonic() - began < 10
    assert ran.returncode == 128 + signal.SIGTERM and ran.stdout == "", ran.stdout
    assert "Traceback" not in ran.stderr
    assert_says_why_the_wrong_one_failed(ran.stderr)
    assert "1 of 3 units are finished; the store keeps them" in ran.stderr
    assert processes_that_name("aotc.compiler", f"TMPDIR={temporary}") == []
    assert list(temporary.glob("aotc-build-*")) == []
    assert Store.open(store).tags() == []
    assert plan(manifest, store) == [False, True, False]


def test_a_build_that_cannot_publish_says_why_units_failed(manifest: Path, tmp_path: Path) -> None:
    add_models(manifest, [{"batch": 2}])
    store = tmp_path / "store"
    build = start("-m", "aotc", "build", manifest, "--store", store, "--jobs", "1")
    wait_for_line(build, "[1/2] ")
    (store / "index.json").unlink()
    (store / "index.json").mkdir()
    ran = finish(build)
    assert ran.returncode == 2 and "error: " in ran.stderr and "index.json" in ran.stderr, ran.stderr
    assert_says_why_the_wrong_one_failed(ran.stderr)
    assert "1 of 2 units are finished; the store keeps them" in ran.stderr


def test_a_build_that_cannot_begin_says_only_why(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = run_here("build", manifest, "--store", tmp_path / "file" / "store")
    assert ran.returncode == 2 and "error: " in ran.stderr and "units are finished" not in ran.stderr, ran.stderr


def test_a_killed_build_leaves_no_worker_and_no_tag(manifest: Path, tmp_path: Path, temporary: Path) -> None:
    """Its work folder goes with the next build: here, one of an earlier build with this one."""
    store, earlier = tmp_path / "store", temporary / "aotc-build-killed_1"
    earlier.mkdir()
    os.utime(earlier, (0, 0))
    build = start_build(manifest, store, temporary)
    wait_for_line(build, "linear batch=2 ")
    assert not earlier.exists() and [*temporary.glob("aotc-build-*")]
    wait_for_line(build, "linear batch=2 ")
    assert processes_that_name("aotc.compiler", f"TMPDIR={temporary}")
    build.kill()
    assert finish(build).returncode == -signal.SIGKILL
    assert wait_until_none_names("aotc.compiler", 10, f"TMPDIR={temporary}") == []
    assert Store.open(store).tags() == []


def test_ctrl_c_ends_a_build_that_waits_for_another_one(manifest: Path, tmp_path: Path, temporary: Path) -> None:
    store = tmp_path / "store"
    key = plan_here(read_manifest(manifest), store)[0].unit.key.removeprefix("sha256:")
    lock = store / ".aotc" / "units" / f"{key}.lock"
    lock.parent.mkdir(parents=True)
    with filelock.FileLock(lock):
        build = start_build(manifest, store, temporary)
        wait_for_line(build, "linear batch=2 ")
        build.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert finish(build).returncode == 128 + signal.SIGINT
        assert time.monotonic() - began < 10


NUMPY = """
import os, pathlib, signal
first = pathlib.Path(__file__).with_name("first")
if not first.exists():
    first.touch()
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_while_numpy_is_imported_is_not_lost(manifest: Path, tmp_path: Path) -> None:
    """torch's C++ code is the first of torch to import it, and clears every error."""
    (tmp_path / "numpy.py").write_text(NUMPY)
    build = start("-m", "aotc", "build", manifest, "--store", tmp_path / "store", "--dry-run", PYTHONPATH=str(tmp_path))
    ran = finish(build)
    assert ran.returncode == 128 + signal.SIGINT and "interrupted" in ran.stderr, ran.stderr


def test_ctrl_c_that_python_drops_while_a_build_plans_is_raised_when_it_has_planned() -> None:
    """As in a callback of the import system: what it raises is ignored."""

    class Drops:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Shown(BuildOptions(Path("manifest.yaml"), "store", DEFAULTS)).planning():
            sys.unraisablehook, hook = (lambda _: None), sys.unraisablehook
            Drops()
            sys.unraisablehook = hook
        with Shown(BuildOptions(Path("manifest.yaml"), "store", DEFAULTS)).planning():
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


class Executor:
    """One that starts nothing, and whose units run until it is ended."""

    slots, parallel = 1, 1

    def __init__(self) -> None:
        self.ended = threading.Event()

    def end(self) -> None:
        self.ended.set()


def test_ctrl_c_while_units_are_begun_ends_those_that_run() -> None:
    executor, running, went_on = Executor(), threading.Event(), threading.Event()

    def run(number: int) -> None:
        running.set()
        if executor.ended.wait(20):
            went_on.set()

    def units() -> Iterator[int]:
        yield 1
        running.wait(20)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side_by_side(run, cast("Any", units()), cast("Any", executor))
    assert went_on.is_set()


def test_two_builds_of_one_unit_compile_it_once(manifest: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    manifest.write_text(manifest.read_text().replace("batch: 3", "batch: 2"))
    builds = [start("-m", "aotc", "build", manifest, "--store", store, "--json") for _ in range(2)]
    ran = [finish(build) for build in builds]
    assert [one.returncode for one in ran] == [0, 0], ran[0].stderr + ran[1].stderr
    reports = [json.loads(one.stdout) for one in ran]
    assert sorted(report["units"][0]["status"] for report in reports) == ["built", "cached"]
    assert reports[0]["bundles"] == reports[1]["bundles"]
    assert [str(entry) for entry in Store.open(store).tags()] == ["linear:latest"]


def test_builds_publish_into_one_store_at_once(zoo_store: Path, tmp_path: Path) -> None:
    """Nothing to compile, so all of them come to the tags together: none is lost."""
    store = copy_store(zoo_store, tmp_path)
    tags = [f"tag{number}" for number in range(4)]
    command = ("-m", "aotc", "build", ZOO / "manifest.yaml", "--store", store.path, "--model", "linear", "--tag")
    ran = [finish(build) for build in [start(*command, tag) for tag in tags]]
    assert [one.returncode for one in ran] == [0] * 4
    assert {entry.tag for entry in store.tags() if entry.model == "linear"} == {"latest", *tags}
    assert {artifact_of(store, "linear", tag).encode() for tag in tags} == {artifact_of(store, "linear").encode()}
