"""A short run of the campaign of random `kill -9`s; `tests/benchmarks/kill9.py --kills 1000` is the long one."""

from __future__ import annotations

from pathlib import Path

from processes import ROOT, finish, start


def test_random_kills_lose_nothing_and_leave_only_garbage(quickstart_store: Path, tmp_path: Path) -> None:
    script = ROOT / "tests" / "benchmarks" / "kill9.py"
    ran = finish(start(script, "--kills", 20, "--seed", 1, "--store", quickstart_store, "--folder", tmp_path / "world"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "20 kills" in ran.stdout
