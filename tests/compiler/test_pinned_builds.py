"""A build from pins: nothing is measured, the pinned candidate is what runs, and equal pins build equal bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import filelock
import pytest
from processes import ROOT, finish, run_aotc, start

LIBRARY_CALL = "_linear_pointwise"  # oneDNN's
MANIFEST = """
version: 1
models:
  two-layers:
    factory: pair.py:pair
    weights: frozen
    inputs:
      input: {shape: [batch, 96]}
    buckets:
      - {batch: 64}
"""
FACTORY = """
import torch

def pair():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.GELU(), torch.nn.Linear(96, 96), torch.nn.ReLU())
"""
RUN = """
import sys, torch, aotc, pair
module = pair.pair().eval()
with torch.no_grad():
    x = torch.randn(64, 96)
    y, expected = aotc.load(sys.argv[1], module)(x), module(x)
print("right", torch.allclose(y, expected, atol=1e-4))
"""


def run(*arguments: Any, ok: bool = True, **changes: str) -> str:
    ran = run_aotc(*arguments, **changes)
    assert (ran.returncode == 0) == ok, ran.stdout + ran.stderr
    return ran.stdout + ("" if ok else ran.stderr)


def elsewhere(folder: Path) -> dict[str, str]:
    """A HOME and a temporary folder of a build's own."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    return {"HOME": str(folder), "TMPDIR": str(folder / "tmp")}


@pytest.fixture(scope="module")
def measured(shared_folder: Path) -> Path:
    """A folder with a manifest, and a store and a pick file of a build that measured."""
    folder = shared_folder / "pinned-builds"
    with filelock.FileLock(shared_folder / "pinned-builds.lock"):
        if not (folder / "picks.json").exists():
            folder.mkdir()
            (folder / "two.yaml").write_text(MANIFEST)
            (folder / "pair.py").write_text(FACTORY)
            run("build", folder / "two.yaml", "--store", folder / "store")
            run("picks", "two-layers", "--store", folder / "store", "--export", folder / "picks.json")
    return folder


def picks(store: Path, **changes: str) -> list[dict[str, Any]]:
    (unit,) = json.loads(run("picks", "two-layers", "--store", store, "--json", **changes))
    return list(unit["picks"])


def files(store: Path) -> dict[str, str]:
    shown = json.loads(run("inspect", "two-layers", "--store", store, "--json"))
    (variant,) = shown["artifacts"][0]["variants"]
    return {file["name"]: file["digest"] for file in (*variant["files"], variant["report"])}


def primitives(store: Path, folder: Path) -> int:
    """How many oneDNN matrix products a call runs, as oneDNN itself reports them, beyond the eager module's own."""
    paths = os.pathsep.join(map(str, (folder, ROOT)))
    process = start("-c", RUN, f"{store}#two-layers", cwd=folder, PYTHONPATH=paths, ONEDNN_VERBOSE="1")
    ran = finish(process)
    assert "right True" in ran.stdout, ran.stdout + ran.stderr
    lines = [
        line for line in ran.stdout.splitlines() if ",exec,cpu,inner_product" in line or ",exec,cpu,matmul" in line
    ]
    return len(lines)


def test_every_race_is_recorded_with_its_times_and_the_fastest_wins(measured: Path) -> None:
    races = picks(measured / "store")
    assert {race["subject"] for race in races} == {"linear_unary"}
    assert len({str(race["inputs"]) for race in races}) == 1
    assert {next(said for said in race["arguments"] if said.startswith("attr=")) for race in races} == {
        "attr=gelu",
        "attr=relu",
    }
    for race in races:
        times = [candidate["ms"] for candidate in race["candidates"]]
        assert len(times) >= 2 and times == sorted(times) and times[0] > 0
        assert race.get("chosen", 0) == 0


def test_a_build_from_pins_measures_nothing_and_gives_the_same_code_elsewhere(measured: Path, tmp_path: Path) -> None:
    home = elsewhere(tmp_path / "home")
    arguments = ("--picks", measured / "picks.json", "--locked", "--json")
    report = json.loads(run("build", measured / "two.yaml", "--store", tmp_path / "store", *arguments, **home))
    assert report["units"][0]["notes"] == [f"{len(picks(measured / 'store'))} picks pinned, 0 measured"]
    assert files(tmp_path / "store") == files(measured / "store")


def test_the_pinned_candidate_is_what_runs(measured: Path, tmp_path: Path) -> None:
    """oneDNN's own log says what runs: its product where the library call is pinned, none where the template is.

    The layers differ only in what is done behind them, and each has a pin of its own.
    """
    raced = picks(measured / "store")
    (template,) = {c["name"] for race in raced for c in race["candidates"] if c["name"].startswith("cpp_")}
    runs = []
    for number, wanted in enumerate(((template, template), (template, LIBRARY_CALL))):
        pins = json.loads((measured / "picks.json").read_text())
        for pick, name in zip(pins["units"][0]["picks"], wanted, strict=True):
            pick["candidates"] = [{"name": name}]
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(pins))
        store = tmp_path / str(number)
        run("build", measured / "two.yaml", "--store", store, "--picks", file, "--locked")
        runs.append(primitives(store, measured))
    assert runs == [runs[0], runs[0] + 1]


def test_a_check_builds_the_same_bytes_and_notices_other_ones(measured: Path, tmp_path: Path) -> None:
    shown = run("build", measured / "two.yaml", "--store", measured / "store", "--check", **elsewhere(tmp_path))
    assert "the same, byte for byte" in shown


def test_a_locked_build_names_what_is_missing_and_what_is_stale(measured: Path, tmp_path: Path) -> None:
    pins = json.loads((measured / "picks.json").read_text())
    first, second = pins["units"][0]["picks"][:2]
    first["candidates"] = [{"name": "a_kernel_of_another_torch"}]
    pins["units"][0]["picks"].remove(second)
    (tmp_path / "picks.json").write_text(json.dumps(pins))
    manifest = measured / "two.yaml"
    said = run("build", manifest, "--store", tmp_path / "s", "--picks", tmp_path / "picks.json", "--locked", ok=False)
    assert "is not pinned" in said and "a_kernel_of_another_torch" in said and "--export" in said
    assert LIBRARY_CALL in said


def test_locked_without_picks_is_a_usage_error(measured: Path, tmp_path: Path) -> None:
    assert "--locked needs picks" in run(
        "build", measured / "two.yaml", "--store", tmp_path / "store", "--locked", ok=False
    )
