"""Fixtures that are built once and shared: compiling is slow, so every test of compiled code uses the same stores."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import hypothesis
import pytest
import torch
from doctoring import copy_store
from in_process import run_here
from processes import ROOT, ZOO

from aotc.store.layout.store import Store

# No deadline: a busy machine is not a failure. In CI the same cases each time: a new one must not fail another change.
hypothesis.settings.register_profile("aotc", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("aotc")


def pytest_configure(config: pytest.Config) -> None:
    """One cache of compiled files for the whole session: the processes of pytest-xdist inherit PATH."""
    found = shutil.which("g++")
    if found and not {"PYTEST_XDIST_WORKER", "CXX"} & os.environ.keys():
        folder = Path(tempfile.mkdtemp(prefix="aotc-cached-compiler-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        (folder / "compiler").symlink_to(found)
        compiler = folder / "g++"
        compiler.write_text(f"#!{sys.executable} -IS\n{(ROOT / 'tests' / 'cached_compiler.py').read_text()}")
        if kept := os.environ.get("AOTC_TESTS_COMPILER_CACHE"):
            (folder / "kept").symlink_to(_kept_between_runs(Path(kept), compiler.read_text(), found))
        compiler.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


KEPT_DAYS = 14


def _kept_between_runs(folder: Path, wrapper: str, found: str) -> Path:
    """The folder of what this compiler made of this torch's headers, without what no run has used for `KEPT_DAYS`.

    Sources and options are in each file's own name (`cached_compiler.py`); names of headers are in compiled code."""
    version = subprocess.run([found, "--version"], check=True, capture_output=True, text=True).stdout
    named = "\0".join((wrapper, version, str(torch.__version__), torch.__file__))
    kept = folder.absolute() / hashlib.sha256(named.encode()).hexdigest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*/*"):
        with contextlib.suppress(OSError):  # another run may remove it, too
            if time.time() - file.stat().st_mtime > KEPT_DAYS * 24 * 3600:
                file.unlink()
    return kept


@pytest.fixture
def plain_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the cache of `cached_compiler.py`: for tests of precompiled headers."""
    folders = [folder for folder in os.environ["PATH"].split(":") if "/aotc-cached-compiler-" not in folder]
    monkeypatch.setenv("PATH", ":".join(folders))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files to each process, so that what a file builds is built once, in the order of collection."""
    from xdist.scheduler import LoadFileScheduling

    if config.getvalue("dist") != "load":  # asked for
        return None
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


LONG = {"advise", "bench", "compiler", "docs", "end_to_end", "gate", "models", "training"}
"""Folders whose tests build: files of up to two minutes. They begin, so that no process waits for one in the end."""


SERVERS = {"registry_server", "object_servers", "services", "store_backends", "selenium"}
"""Modules of tests and packages by which a test starts a server or a browser."""


NEVER_QUICK = LONG | {"cuda", "engines", "fuzzing"}
"""Folders in which no test is `quick`. In others those are that build nothing and start no server."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which `-m quick`, `every_torch` or `nightly` runs nothing are not imported: of all, that takes half a
    minute."""
    if collection_path.suffix != ".py":
        return None
    match config.option.markexpr:
        case "quick" if collection_path.parent.name in NEVER_QUICK and collection_path.name != "conftest.py":
            return True
        case "every_torch" if not re.search("every_torch|rank_suite", collection_path.read_text()):
            return True
        case "nightly" if "nightly" not in collection_path.read_text():
            return True
    return None


def _needs(item: pytest.Item) -> Iterator[str]:
    """The markers `compile` and `servers`: by a test's folder, its fixtures, and what its file imports."""
    names = (getattr(value, "__module__", None) or "" for value in vars(getattr(item, "module", item)).values())
    imported = {str(name).partition(".")[0] for name in names}
    fixtures = set(getattr(item, "fixturenames", ()))
    if item.path.parent.name in LONG or "shared_folder" in fixtures or "in_process" in imported:
        yield "compile"
    if fixtures & {"backends_started", "registry"} or imported & SERVERS:
        yield "servers"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With `--durations=N`, also the seconds of whole files: what a file builds is spread over its tests."""
    if not (most := config.option.durations):
        return
    seconds = Counter[str]()
    for report in itertools.chain(*terminalreporter.stats.values()):
        seconds[getattr(report, "nodeid", "").partition("::")[0]] += getattr(report, "duration", 0.0)
    terminalreporter.section(f"slowest {most} files, of {sum(seconds.values()):.0f} s in all")
    for name, spent in seconds.most_common(most):
        terminalreporter.write_line(f"{spent:8.1f}s {name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, and the markers of what a test needs. Tests marked `cuda` run only where there is a GPU, those
    marked `every_torch(alone=True)` and `nightly` only in those lists."""
    items.sort(key=lambda item: item.path.parent.name not in LONG)
    for item in items:
        for name in _needs(item):
            item.add_marker(name)
        if item.path.parent.name not in NEVER_QUICK and not any(map(item.get_closest_marker, ("compile", "servers"))):
            item.add_marker("quick")
    if "every_torch" not in config.option.markexpr:
        alone = pytest.mark.skip(reason="runs in `pytest -m every_torch`")
        for item in items:
            if any(mark.kwargs.get("alone") for mark in item.iter_markers("every_torch")):
                item.add_marker(alone)
    if "nightly" not in config.option.markexpr:
        long = pytest.mark.skip(reason="runs in `pytest -m nightly`")
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(long)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA GPU")
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(skip)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the whole session, also where pytest-xdist runs it in several processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def _built(folder: Path, name: str, manifest: Path, models: Sequence[str] = ()) -> Path:
    store = folder / name
    with filelock.FileLock(folder / f"{name}.lock"):
        report = folder / f"{'-'.join((name, *models))}.json"
        if not report.exists():
            chosen = (f"--model={model}" for model in models)
            ran = run_here("build", manifest, "--store", store, "--jobs", "2", "--json", *chosen)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            report.write_text(ran.stdout)
        assert json.loads(report.read_text())["bundles"]
    return store


@pytest.fixture(scope="session")
def built() -> Any:
    """Builds a manifest, or some of its models, into a store of that name in a folder, once: `built(folder, name,
    manifest, models=())`."""
    return _built


@pytest.fixture(scope="session")
def quickstart_store(shared_folder: Path) -> Path:
    """A store with the model of manifests/quickstart.yaml."""
    return _built(shared_folder, "quickstart-store", ROOT / "manifests" / "quickstart.yaml")


@pytest.fixture(scope="session")
def zoo_store(shared_folder: Path) -> Path:
    """A store with every model of tests/zoo/manifest.yaml. Treat it as read-only.

    `$AOTC_TESTS_KEEP_ZOO`, if it is set, gets a copy: for the tests of `$AOTC_TESTS_OTHER_TORCH`."""
    store = _built(shared_folder, "zoo-store", ZOO / "manifest.yaml")
    if kept := os.environ.get("AOTC_TESTS_KEEP_ZOO"):
        with filelock.FileLock(shared_folder / "kept-zoo.lock"):
            if not Path(kept).exists():
                shutil.copytree(store, kept)
    return store


@pytest.fixture
def copied(zoo_store: Path, tmp_path: Path) -> Store:
    """A copy of the zoo's store, for a test of its own."""
    return copy_store(zoo_store, tmp_path)


@pytest.fixture(scope="session")
def regions_store(shared_folder: Path) -> Path:
    """A store with the models of tests/zoo/regions.yaml. Treat it as read-only."""
    return _built(shared_folder, "regions-store", ZOO / "regions.yaml")


@pytest.fixture(scope="session")
def training_store(shared_folder: Path) -> Path:
    """A store with the models of tests/training/training.yaml. Treat it as read-only."""
    return _built(shared_folder, "training-store", ROOT / "tests" / "training" / "training.yaml")


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module tests/zoo/models.py; the cache folder is this test's own."""
    monkeypatch.syspath_prepend(str(ZOO))
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    import models

    return models


@pytest.fixture(scope="session")
def backends_started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    """Every place that a store can be (`store_backends.py`), by name. Servers start at their first use."""
    from store_backends import Started

    with contextlib.ExitStack() as stack:
        yield Started(tmp_path_factory.mktemp, stack)
