"""A service that switches releases holds one model's memory of the GPU, with and without CUDA graphs."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from gpu_runs import Gpu, inputs
from safetensors.torch import save_file

import aotc
from aotc.telemetry import sample_shapes

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("launch", ["never", "always"])
def test_ten_switches_hold_the_memory_of_one_release(gpu: Gpu, launch: str, tmp_path: Path) -> None:
    state = gpu.module("ranged").state_dict()
    save_file({name: each.cpu() for name, each in state.items()}, tmp_path / "model.safetensors")
    del state
    gc.collect()
    gc.disable()  # it may come by after many releases
    try:
        allocated, reserved = [], []
        for _ in range(10):
            serving = aotc.load(f"{gpu.store}#ranged", weights=tmp_path, graphs=aotc.Graphs(use=launch))
            sample_shapes(serving)
            for rows in (8, 9, 8):
                serving(inputs(1, rows, 512)[0])
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
            reserved.append(torch.cuda.memory_reserved())
    finally:
        gc.enable()
    assert max(allocated) <= 1.15 * allocated[0], allocated
    assert reserved[-1] == reserved[2], reserved  # while the second was loaded, two were there
