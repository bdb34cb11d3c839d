"""Waiting for Inductor's compile processes: once, and never in vain."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import msgspec
import pytest
from processes import finish, start
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile

from aotc.compiler.messages import Job, Unit
from aotc.compiler.toolchain import triton_compilers
from aotc.compiler.toolchain.triton_compilers import begin_triton_compilers, wait_for_triton_compilers
from aotc.machine.targets import parse_target
from aotc.manifest import read_manifest

WORKER = """
import sys
from aotc.compiler import unit
from aotc.compiler.workers import compile_worker

unit.begin_triton_compilers = lambda options, **more: print("begun", options["max_autotune"])
unit.build_module = lambda spec, folder, **more: sys.exit("made")
sys.argv[1:] = sys.argv[-1:]
compile_worker.main()
"""
MANIFEST = """
version: 1
models:
  m:
    factory: torch.nn:ReLU
    inputs: {input: {shape: [n]}}
    buckets: [{n: 4}]
"""


@pytest.fixture(autouse=True)
def waited_for_never() -> Iterator[None]:
    wait_for_triton_compilers.cache_clear()
    yield
    wait_for_triton_compilers.cache_clear()


def test_what_never_starts_is_waited_for_once_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(AsyncCompile, "_ready_future", Future())
    monkeypatch.setattr(triton_compilers, "STARTING", 0.01)
    with caplog.at_level(logging.WARNING, "aotc"):
        for _ in range(3):
            wait_for_triton_compilers()
    assert [record.message for record in caplog.records] == ["Inductor's compile processes have not started within 0 s"]


def test_what_died_while_it_started_is_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    died: Future[str] = Future()
    died.set_exception(BrokenProcessPool("killed"))
    monkeypatch.setattr(AsyncCompile, "_ready_future", died)
    wait_for_triton_compilers()


def test_nothing_is_waited_for_where_nothing_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncCompile, "_ready_future", None)
    wait_for_triton_compilers()


def test_they_start_with_the_user_s_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    started: list[str] = []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: started.append(config.worker_start_method))
    begin_triton_compilers({"worker_start_method": "spawn"})
    assert started == ["spawn"]
    os.environ.pop("TRITON_PTXAS_PATH", None)


@pytest.mark.parametrize(("target", "begins"), [("cuda:sm_90", True), ("cpu:x86-64-v3", False)])
def test_a_gpu_unit_begins_them_before_all_else(tmp_path: Path, target: str, begins: bool) -> None:
    (tmp_path / "manifest.yaml").write_text(MANIFEST)
    spec = read_manifest(tmp_path / "manifest.yaml").models["m"]
    unit = Unit(spec, spec.buckets[0], parse_target(target), {}, "sha256:0")
    job = Job(unit, str(tmp_path), str(tmp_path))
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(job))
    ran = finish(start("-c", WORKER, tmp_path / "job.json"))
    said = [line for line in ran.stderr.splitlines() if line.startswith(("begun", "made"))]
    assert said == (["begun True"] if begins else []) + ["made"], ran.stderr
