"""Which of torch's attentions a library calls: the one that won, and for sizes that vary one that lies compiled."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from gpu_runs import FOLDER, Gpu, close, inputs, run_python, start_aotc

from aotc.compiler.autotune.attention import WORTH_COMPILING, fastest
from aotc.picks import Pick, UnitPicks
from aotc.store.layout.built import read_report
from aotc.store.layout.store import Store
from aotc.tools.inspection.artifact_picks import exported, picks_of

pytestmark = pytest.mark.cuda

SMALL, LARGE = 64, 2048


def race(unit: UnitPicks) -> Pick:
    (pick,) = [pick for pick in unit.picks if pick.subject == "scaled_dot_product_attention"]
    return pick


def called(gpu: Gpu, model: str) -> list[list[str]]:
    """For each variant the attentions that its library calls, as torch names them."""
    store = Store.open(gpu.store)
    reports = [read_report(store, variant) for variant in gpu.artifact(model).variants]
    return [[one.name for one in report.kernels if "_attention" in one.name] for report in reports if report]


def test_the_recorded_attention_is_the_fastest_and_what_is_called(gpu: Gpu) -> None:
    units = picks_of("attention", gpu.store)
    assert len(units) == 2
    for unit, names in zip(units, called(gpu, "attention"), strict=True):
        pick = race(unit)
        times = {candidate.name: candidate.ms for candidate in pick.candidates if candidate.ms is not None}
        assert len(times) > 1 and pick.winner.name == fastest(times)
        assert names == [f"_scaled_dot_product_{pick.winner.name}_attention"]
        if "cudnn" in times and pick.winner.name != "cudnn":
            assert times["cudnn"] > WORTH_COMPILING * times[pick.winner.name]


@pytest.mark.parametrize(
    ("model", "sizes"), [("attention", [SMALL, LARGE]), ("attention-ranged", [2, 3, 63, 700, LARGE])]
)
def test_outputs_are_eager_s(gpu: Gpu, model: str, sizes: list[int]) -> None:
    compiled, eager = gpu.loaded(model)
    for size in sizes:
        (qkv,) = inputs(1, 1, size, 3072)
        assert close(compiled(qkv.bfloat16()), eager(qkv.bfloat16()), 2e-2), size


NEW_SIZES = """
import sys, torch
from pathlib import Path
from gpu_runs import Gpu, inputs

def compilers():
    mapped = {line.rpartition("/")[2].strip() for line in open("/proc/self/maps")}
    return sorted(name for name in mapped if "ptxjit" in name or "runtime_compiled" in name)

gpu = Gpu(Path(sys.argv[1]))
with torch.no_grad():
    compiled, eager = gpu.loaded("attention-ranged")
    for size in (2, 63, 64, 65, 700, 2048):
        compiled(inputs(1, 1, size, 3072)[0].bfloat16())
    torch.cuda.synchronize()
    print(compilers())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        eager(inputs(1, 1, 65, 3072)[0].bfloat16())
    torch.cuda.synchronize()
    print(compilers())
"""


def test_no_size_of_a_range_is_compiled_for_when_it_comes(gpu: Gpu, tmp_path: Path) -> None:
    """As cuDNN would do it, with the driver's compiler: seen by what is mapped into the process."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("torch chooses cuDNN from Hopper on")
    of_ours, of_cudnn = run_python(NEW_SIZES, gpu.store, CUDA_CACHE_PATH=str(tmp_path)).splitlines()
    assert of_ours == "[]"
    assert "runtime_compiled" in of_cudnn


def test_a_pinned_attention_is_built_although_another_one_is_faster(gpu: Gpu, tmp_path: Path) -> None:
    small, large = picks_of("attention", gpu.store)
    pick = race(small)
    slower = next(index for index in range(len(pick.candidates)) if index != pick.chosen)
    name = pick.candidates[slower].name
    changed = [msgspec.structs.replace(one, chosen=slower) if one is pick else one for one in small.picks]
    pins, output, store = tmp_path / "picks.json", tmp_path / "out.json", tmp_path / "store"
    pins.write_bytes(exported([msgspec.structs.replace(small, picks=tuple(changed)), large]))
    arguments = ("--model", "attention", "--store", store, "--picks", pins, "--json")
    assert start_aotc("build", FOLDER / "manifest.yaml", *arguments, output=output).wait() == 0, output.read_text()
    assert [candidate.name for candidate in race(picks_of("attention", store)[0]).candidates] == [name]
    assert called(Gpu(store), "attention") == [
        [f"_scaled_dot_product_{name}_attention"],
        [f"_scaled_dot_product_{race(large).winner.name}_attention"],
    ]
