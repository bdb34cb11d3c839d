"""The log of the suite on a GPU: written by a run of all its tests, with a GPU, and by no other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip(reason="no second GPU")
def test_skips(): pass
@pytest.fixture
def broken(): raise OSError
def test_breaks(broken): pass
"""
TORCH = """
__version__ = "2.99.0"

class cuda:
    is_available = lambda: True
    get_device_name = lambda: "NVIDIA H100"
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "tests" / "cuda"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "cuda" / "last_run.py", folder)
    shutil.copy(ROOT / "tests" / "run_log.py", folder)
    (folder / "conftest.py").write_text("from last_run import pytest_terminal_summary")
    (folder / "torch.py").write_text(TORCH)
    (folder / "test_all.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return folder


def run(suite: Path, *arguments: str, **variables: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "AOTC_"))}
    inherited["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # hypothesis alone takes a second to import
    command = [sys.executable, "-m", "pytest", *arguments]
    ran = subprocess.run(
        command, cwd=suite.parents[1], env={**inherited, **variables}, capture_output=True, text=True, check=False
    )
    assert "1 failed" in ran.stdout or "deselected" in ran.stdout, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("processes", [(), ("-p", "xdist", "-n", "2")], ids=["in one process", "in two"])
def test_a_whole_run_writes_its_counts_and_its_commit(suite: Path, processes: tuple[str, ...]) -> None:
    run(suite, "tests/cuda", *processes, AOTC_COMMIT="abc123")
    written = json.loads((suite / "last_run.json").read_text())
    assert {name: written[name] for name in ("commit", "torch", "gpu", "passed", "failed", "skipped")} == {
        "commit": "abc123",
        "torch": "2.99.0",
        "gpu": "NVIDIA H100",
        "passed": 1,
        "failed": 2,
        "skipped": 1,
    }
    assert written.keys() == {"commit", "date", "torch", "gpu", "passed", "failed", "skipped", "seconds"}


def test_a_run_of_some_tests_writes_nothing_and_one_of_an_unknown_commit_says_so(suite: Path) -> None:
    run(suite, "tests/cuda", "-k", "passes", AOTC_COMMIT="abc123")
    assert "set AOTC_COMMIT" in run(suite, "tests/cuda")
    assert not (suite / "last_run.json").exists()
