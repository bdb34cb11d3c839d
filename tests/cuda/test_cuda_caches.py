"""Caches of compilers on a GPU: a decode step finds all that it compiles in folders that were restored elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gpu_runs import FOLDER
from processes import finish, run_aotc, start

from aotc.tools.caches.folders import VARIABLES

pytestmark = pytest.mark.cuda

KINDS = ("inductor", "triton", "computecache")
STEP = FOLDER / "decode_step.py"


def folders(parent: Path) -> list[str]:
    return [f"--cache={kind}={parent / kind}" for kind in KINDS]


def test_a_decode_step_starts_from_restored_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    store, first, second = (tmp_path / name for name in ("store", "first", "second"))
    compiled = finish(start(STEP, **{VARIABLES[kind]: str(first / kind) for kind in KINDS}))
    assert compiled.returncode == 0, compiled.stderr
    assert all(any((first / kind).rglob("*")) for kind in KINDS)
    assert run_aotc("cache", "save", "step:v1", "--store", store, *folders(first)).returncode == 0
    required = ("--require", "used", "--require", "no-compiler")
    ran = run_aotc("cache", "run", "step:v1", "--store", store, *folders(second), *required, "--", sys.executable, STEP)
    assert ran.returncode == 0, ran.stderr
    assert "0 written anew, 0 replaced, 0 compiles" in ran.stderr
