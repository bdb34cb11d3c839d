"""A build from pins: nothing is measured, the pinned candidate is what runs, and equal pins build equal bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import filelock
import pytest
from doctoring import artifact_of
from in_process import run_here
from processes import ROOT, finish, run_aotc, start

from aotc.picks import Pick
from aotc.store.layout.store import Store
from aotc.tools.inspection.artifact_picks import picks_of

pytestmark = pytest.mark.every_torch

LIBRARY_CALL = "_linear_pointwise"  # oneDNN's
MODEL = {
    "factory": "pair.py:pair",
    "weights": "frozen",
    "inputs": {"input": {"shape": ["batch", 96]}},
    "buckets": [{"batch": 64}],
}
FACTORY = """
import torch

def pair():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.GELU(), torch.nn.Linear(96, 96), torch.nn.Tanh())
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
    ran = (run_aotc if changes else run_here)(*arguments, **changes)
    assert (ran.returncode == 0) == ok, ran.stdout + ran.stderr
    return ran.stdout + ("" if ok else ran.stderr)


def write_manifest(path: Path, *models: str) -> Path:
    path.write_text(json.dumps({"version": 1, "models": dict.fromkeys(models, MODEL)}))  # JSON is YAML
    return path


@pytest.fixture(scope="module")
def measured(shared_folder: Path) -> Path:
    """A folder with a manifest, and a store and a pick file of a build that measured."""
    folder = shared_folder / "pinned-builds"
    with filelock.FileLock(shared_folder / "pinned-builds.lock"):
        if not (folder / "picks.json").exists():
            folder.mkdir()
            (folder / "pair.py").write_text(FACTORY)
            manifest = write_manifest(folder / "two.yaml", "two-layers")
            run("build", manifest, "--store", folder / "store")
            run("picks", "two-layers", "--store", folder / "store", "--export", folder / "picks.json")
    return folder


def races_of(folder: Path) -> tuple[Pick, ...]:
    (unit,) = picks_of("two-layers", folder / "store")
    return unit.picks


@pytest.fixture(scope="module")
def pinned(measured: Path, shared_folder: Path) -> Path:
    """A store with the model three times, its layers pinned to the winners of the races, both to the template, and one
    to the template and one to the library's call: built in one build, in a HOME and a temporary folder of its own."""
    folder = shared_folder / "from-pins"
    with filelock.FileLock(shared_folder / "from-pins.lock"):
        if not (folder / "report.json").exists():
            (folder / "tmp").mkdir(parents=True)
            (folder / "pair.py").write_text(FACTORY)
            manifest = write_manifest(folder / "three.yaml", *WANTED)
            (folder / "picks.json").write_text(json.dumps(pins_of_all(measured)))
            more = ("--picks", folder / "picks.json", "--locked", "--json")
            places = {"HOME": str(folder), "TMPDIR": str(folder / "tmp")}
            (folder / "report.json").write_text(run("build", manifest, "--store", folder / "store", *more, **places))
    return folder


WANTED: dict[str, tuple[str, ...]] = {"winners": (), "templates": ("", ""), "mixed": ("", LIBRARY_CALL)}
"""What each model's layers are pinned to; "" is the template."""


def pins_of_all(measured: Path) -> dict[str, Any]:
    (template,) = {c.name for race in races_of(measured) for c in race.candidates if c.name.startswith("cpp_")}
    pins = json.loads((measured / "picks.json").read_text())
    (unit,) = pins["units"]
    units = []
    for model, wanted in WANTED.items():
        picks = (
            [
                {**pick, "candidates": [{"name": name or template}]}
                for pick, name in zip(unit["picks"], wanted, strict=True)
            ]
            if wanted
            else unit["picks"]
        )
        units.append({**unit, "model": model, "picks": picks})
    return {**pins, "units": units}


def files(store: Path, model: str) -> dict[str, str]:
    (variant,) = artifact_of(Store.open(store), model).variants
    assert variant.report is not None
    return {file.name: file.digest for file in (*variant.files, variant.report)}


def primitives(folder: Path, model: str) -> int:
    """How many oneDNN matrix products a call runs, as oneDNN itself reports them, beyond the eager module's own."""
    paths = os.pathsep.join(map(str, (folder, ROOT)))
    process = start("-c", RUN, f"{folder / 'store'}#{model}", cwd=folder, PYTHONPATH=paths, ONEDNN_VERBOSE="1")
    ran = finish(process)
    assert "right True" in ran.stdout, ran.stdout + ran.stderr
    lines = [
        line for line in ran.stdout.splitlines() if ",exec,cpu,inner_product" in line or ",exec,cpu,matmul" in line
    ]
    return len(lines)


def test_every_race_is_recorded_with_its_times_and_the_fastest_wins(measured: Path) -> None:
    races = races_of(measured)
    assert {race.subject for race in races} == {"linear_unary"}
    assert len({race.inputs for race in races}) == 1
    assert {next(said for said in race.arguments if said.startswith("attr=")) for race in races} == {
        "attr=gelu",
        "attr=tanh",
    }
    for race in races:
        times = [candidate.ms for candidate in race.candidates]
        assert len(times) >= 2 and times == sorted(times) and times[0] > 0
        assert race.chosen == 0


def test_a_build_from_pins_measures_nothing_and_gives_the_same_code_and_picks_elsewhere(
    measured: Path, pinned: Path, tmp_path: Path
) -> None:
    units = json.loads((pinned / "report.json").read_text())["units"]
    notes = [[note for note in unit["notes"] if "SLOWER THAN EAGER" not in note] for unit in units]
    assert notes == [[f"{len(races_of(measured))} picks pinned, 0 measured"]] * len(WANTED)
    assert files(pinned / "store", "winners") == files(measured / "store", "two-layers")
    run("picks", "winners", "--store", pinned / "store", "--export", tmp_path / "again.json")
    (first,), (again,) = (
        json.loads(path.read_text())["units"] for path in (measured / "picks.json", tmp_path / "again.json")
    )
    assert {**again, "model": "two-layers"} == first


def test_the_pinned_candidate_is_what_runs(pinned: Path) -> None:
    """oneDNN's own log says what runs: its product where the library call is pinned, none where the template is.

    The layers differ only in what is done behind them, and each has a pin of its own.
    """
    templates, mixed = (primitives(pinned, model) for model in ("templates", "mixed"))
    assert mixed == templates + 1


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
