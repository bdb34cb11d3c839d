"""Which depthwise convolutions a library calls: of a template, unless cuDNN's are worth what they take to compile."""

from __future__ import annotations

import pytest
import torch
from gpu_runs import Gpu, close, inputs, run_python

from aotc.compiler.autotune.attention import WORTH_COMPILING
from aotc.compiler.patches.depthwise_template import NAME
from aotc.picks import Pick, UnitPicks
from aotc.tools.inspection.artifact_picks import picks_of

pytestmark = pytest.mark.cuda

CUDNN = "convolution"
LITTLE = 16 << 10
"""Bytes; whatever cuDNN is called for, the driver compiles 4 KB."""


def races(unit: UnitPicks) -> list[Pick]:
    return [pick for pick in unit.picks if pick.subject == "convolution" and "groups=96" in pick.arguments]


def test_templates_race_and_cudnn_s_wins_where_it_is_worth_compiling(gpu: Gpu) -> None:
    for unit in picks_of("depthwise", gpu.store):
        assert len(races(unit)) == 3
        for pick in races(unit):
            times = {str(candidate): candidate.ms for candidate in pick.candidates if candidate.ms is not None}
            ours = [ms for name, ms in times.items() if NAME in name]
            assert len(ours) > 5, times
            worth_it = times[next(name for name in times if name.startswith(CUDNN))] < WORTH_COMPILING * min(ours)
            assert pick.winner.name == CUDNN if worth_it else pick.winner.ms == min(ours)


@pytest.mark.parametrize("batch", [1, 8])
def test_outputs_are_eager_s(gpu: Gpu, batch: int) -> None:
    compiled, eager = gpu.loaded("depthwise")
    (x,) = inputs(1, batch, 3, 96, 120)
    assert close(compiled(x.half()), eager(x.half()), 2e-3)


def test_weights_of_one_channel_a_group_may_lie_channels_last(gpu: Gpu) -> None:
    module = gpu.module("depthwise")
    for convolution in (module.wide, module.strided, module.narrow):
        convolution.to(memory_format=torch.channels_last)
    assert module.wide.weight.stride() == (49, 1, 7, 1)
    (x,) = inputs(1, 8, 3, 96, 120)
    assert close(gpu.load("depthwise", module)(x.half()), module(x.half()), 2e-3)


FIRST_CALLS = """
import os, sys, torch
from pathlib import Path
from gpu_runs import Gpu, inputs

cache = Path(os.environ["CUDA_CACHE_PATH"])

def compiled_bytes():
    torch.cuda.synchronize()
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())

gpu = Gpu(Path(sys.argv[1]))
with torch.no_grad():
    compiled, eager = gpu.loaded("depthwise")
    for batch in (1, 8):
        compiled(inputs(1, batch, 3, 96, 120)[0].half())
    print(compiled_bytes())
    eager = eager.to(memory_format=torch.channels_last)
    for batch in (1, 8):
        eager(inputs(1, batch, 3, 96, 120)[0].half().to(memory_format=torch.channels_last))
    print(compiled_bytes())
"""


def test_the_driver_compiles_none_where_cudnn_s_did_not_win(gpu: Gpu, tmp_path: object) -> None:
    of_ours, of_cudnn = map(int, run_python(FIRST_CALLS, gpu.store, CUDA_CACHE_PATH=str(tmp_path)).split())
    winners = {pick.winner.name for unit in picks_of("depthwise", gpu.store) for pick in races(unit)}
    assert (of_ours > LITTLE) == (CUDNN in winners), (of_ours, winners)
    assert of_cudnn > LITTLE
