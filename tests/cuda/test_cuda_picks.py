"""Picks on a GPU: what is recorded is what runs, and builds from pins measure nothing and repeat to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import FOLDER, Gpu, inputs, start_aotc

import aotc
from aotc.picks import Pick, UnitPicks
from aotc.tools.inspection.artifact_picks import exported, picks_of

pytestmark = pytest.mark.cuda

MODEL = "mlp-bf16"  # the one that is built with autotuning
WARP = 32


def unit_picks(gpu: Gpu, model: str = MODEL) -> UnitPicks:
    (unit,) = picks_of(model, gpu.store)
    return unit


def of_kind(unit: UnitPicks, kind: str) -> list[Pick]:
    return [pick for pick in unit.picks if pick.kind == kind]


def kernels_that_run(gpu: Gpu, model: str, folder: Path) -> dict[str, int]:
    """The kernels of one call, as CUPTI saw them: name → threads in a block."""
    compiled, _ = gpu.loaded(model, graphs=aotc.Graphs(use="never"))
    x = inputs(1, 64, 128)[0].bfloat16()
    compiled(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(x)
        torch.cuda.synchronize()
    trace = folder / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return {event["name"]: event["args"]["block"][0] for event in events if event.get("cat") == "kernel"}


def test_each_race_has_candidates_with_times_and_the_fastest_won(gpu: Gpu) -> None:
    unit = unit_picks(gpu)
    assert unit.device == torch.cuda.get_device_name() and unit.torch == torch.__version__ and unit.triton
    races = of_kind(unit, "operator")
    assert races
    for race in races:
        times = [candidate.ms for candidate in race.candidates if candidate.ms is not None]
        assert len(times) > 1 and race.winner.ms == min(times)
        assert all(text.startswith("bfloat16[") for text in race.inputs)


def test_the_recorded_picks_are_what_runs(gpu: Gpu, tmp_path: Path) -> None:
    """Names and threads of the Triton kernels, from the profile of a call; and no other Triton kernel runs."""
    running = kernels_that_run(gpu, MODEL, tmp_path)
    recorded = {pick.subject: pick.winner.config for pick in of_kind(unit_picks(gpu), "kernel")}
    triton = {name: threads for name, threads in running.items() if name.startswith("triton_")}
    assert triton == {name: WARP * int(str(config["num_warps"])) for name, config in recorded.items()}
    # A product that no template computes, alone or fused with its neighbour, is a library's call.
    products = sum(pick.uses for pick in of_kind(unit_picks(gpu), "operator"))
    fused = sum(pick.winner.name == "fused" for pick in of_kind(unit_picks(gpu), "fusion"))
    templates = sum("_tem_" in name for name in recorded)
    assert fused <= templates <= products
    assert bool(running.keys() - triton.keys()) == (templates < products)


def test_a_build_from_pins_measures_nothing_and_gives_equal_bytes(builds: Any, gpu: Gpu, tmp_path: Path) -> None:
    pins = tmp_path / "picks.json"
    pins.write_bytes(exported([unit_picks(gpu)]))
    for name in ("one", "two/deeper"):
        home, store, output = tmp_path / name / "home", tmp_path / name / "store", tmp_path / f"{name[:3]}.json"
        (home / "tmp").mkdir(parents=True)
        arguments = ("--model", MODEL, "--store", store, "--picks", pins, "--locked", "--json")
        changes = {"HOME": str(home), "TMPDIR": str(home / "tmp")}
        assert start_aotc("build", FOLDER / "manifest.yaml", *arguments, output=output, **changes).wait() == 0
        (unit,) = json.loads(output.read_text())["units"]
        assert any(note.endswith("picks pinned, 0 measured") for note in unit["notes"]), unit["notes"]
        (variant,) = Gpu(store).artifact(MODEL).variants
        (before,) = gpu.artifact(MODEL).variants
        assert variant.files[0].digest == before.files[0].digest
    assert Gpu(tmp_path / "one" / "store").artifact(MODEL) == Gpu(tmp_path / "two/deeper" / "store").artifact(MODEL)


def test_a_check_finds_the_same_bytes(builds: Any, tmp_path: Path) -> None:
    output = tmp_path / "check.txt"
    arguments = ("--model", MODEL, "--model", "mlp", "--store", builds.store, "--check", "--jobs", "3")
    status = start_aotc("build", FOLDER / "manifest.yaml", *arguments, output=output).wait()
    assert output.read_text().count("the same, byte for byte") == 3 and status == 0, output.read_text()
