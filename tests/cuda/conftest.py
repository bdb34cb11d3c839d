"""Everything that the tests on a GPU load is built once, side by side; a folder in $AOTC_CUDA_TESTS is kept for later
runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import filelock
import pytest
import torch
from gpu_runs import FOLDER, Gpu, start_aotc
from last_run import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]


@dataclass(frozen=True)
class Builds:
    """A finished store, and the JSON reports of builds that must fail."""

    store: Path
    report: dict[str, Any]
    failing: dict[str, Any]
    static: dict[str, Any]


@pytest.fixture(scope="session")
def builds(shared_folder: Path) -> Builds:
    """Of all processes of pytest-xdist one builds, and the others wait for it."""
    kept = os.environ.get("AOTC_CUDA_TESTS")
    folder = Path(kept) if kept else shared_folder / "cuda-builds"
    folder.mkdir(parents=True, exist_ok=True)
    built = shared_folder / "cuda-builds.built"
    with filelock.FileLock(built.with_suffix(".lock")):
        if not built.exists():
            build(folder)
            built.touch()
    store, failing, static = (read_report(folder / f"{name}.json") for name in ("store", "failing", "static"))
    failed = [unit for unit in store["units"] if unit["status"] == "failed"]
    assert not failed, "\n\n".join(f"{unit['model']}: {unit['error']}\n{log_of(unit)}" for unit in failed)
    return Builds(folder / "store", store, failing, static)


def build(folder: Path) -> None:
    compiler = make_static_compiler(folder / "static")
    manifest, threads = FOLDER / "manifest.yaml", {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    commands: dict[str, tuple[list[Any], dict[str, str]]] = {
        "store": (["build", manifest, "--store", folder / "store", "--jobs", "6"], {}),
        "failing": (["build", FOLDER / "failing.yaml", "--store", folder / "failing-store", "--jobs", "3"], {}),
        # A store of its own: the compiler gives its name as g++ does, so the unit's key is the same.
        "static": (
            ["build", manifest, "--model", "mlp-fp16", "--store", folder / "static-store"],
            {"CXX": str(compiler)},
        ),
    }
    running = [
        start_aotc(*arguments, "--json", output=folder / f"{name}.json", **threads, **changes)
        for name, (arguments, changes) in commands.items()
    ]
    for process in running:
        process.wait()


def read_report(output: Path) -> dict[str, Any]:
    text = output.read_text()
    assert text.startswith("{"), text + output.with_name(output.name + ".log").read_text()
    report: dict[str, Any] = json.loads(text)
    return report


def log_of(unit: dict[str, Any]) -> str:
    """The end of a failed unit's log."""
    log = Path(unit["log"])
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log.is_file() else ""


def make_static_compiler(folder: Path) -> Path:
    """A g++ that links libstdc++ statically into whatever is shared, as the default compiler of some machines does."""
    folder.mkdir(exist_ok=True)
    compiler, real = folder / "g++", shutil.which("g++")
    compiler.write_text(
        "#!/bin/sh\n"
        'case " $* " in\n'
        f'  *" -shared "*) exec {real} -static-libstdc++ "$@" ;;\n'
        f'  *) exec {real} "$@" ;;\n'
        "esac\n"
    )
    compiler.chmod(0o755)
    return compiler


@pytest.fixture
def gpu(builds: Builds, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """The built models, loaded as a service does: without gradients."""
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
    with torch.no_grad():
        yield Gpu(builds.store)


@pytest.fixture
def own_environment() -> Iterator[None]:
    """For tests that compile in this process: Inductor sets variables, which the keys of later builds would hold."""
    with mock.patch.dict(os.environ):
        yield


@dataclass
class GraphLog:
    """The graphs that were captured to be replayed, and that were replayed, since the test began."""

    captured: int = 0
    replayed: int = 0
    streams: list[torch.cuda.Stream] = field(default_factory=list)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> GraphLog:
    """Counts what every CUDA graph of the process does."""
    log = GraphLog()
    instantiate, replay = torch.cuda.CUDAGraph.instantiate, torch.cuda.CUDAGraph.replay

    def counted_capture(self: Any) -> None:
        log.captured += 1
        instantiate(self)

    def counted_replay(self: Any) -> None:
        log.replayed += 1
        log.streams.append(torch.cuda.current_stream())
        replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "instantiate", counted_capture)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted_replay)
    return log
