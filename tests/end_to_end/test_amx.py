"""Code for AMX's tiles: Linux gives them to a process that asks, and the build and a service do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_aotc, run_python

from aotc.machine.environment import cpu_features

pytestmark = pytest.mark.skipif(
    "amx_tile" not in cpu_features(), reason="needs AMX: this machine's CPU has none, or its kernel refuses it"
)

MANIFEST = """
version: 1
models:
  products:
    factory: models.py:Products
    dtype: bfloat16
    inputs: {x: {shape: [16, 8, 32]}}
    options: {max_autotune_gemm_backends: CPP} # the tile kernel wins, however busy the machine is
"""
MODELS = """
import torch
from torch import nn

class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 32, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return torch.bmm(x, self.w).relu()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("amx")
    (folder / "models.py").write_text(MODELS)
    (folder / "manifest.yaml").write_text(MANIFEST)
    ran = run_aotc("build", "manifest.yaml", "--store", "store", "--jobs", "1", cwd=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


SERVE = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import torch, aotc, models

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(4096)  # too small for the tiles, which a signal's handler would have to save
if sys.argv[2] == "refused":
    assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
module, x = models.Products().eval().bfloat16(), torch.randn(16, 8, 32, dtype=torch.bfloat16)
try:
    compiled = aotc.load(sys.argv[1] + "/store#products", module)
except aotc.EnvironmentMismatchError as error:
    print("refused", error)
else:
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x), rtol=0.02, atol=0.02)
    print("served")
"""


def test_a_tile_kernel_is_built_and_served(folder: Path) -> None:
    ran = run_aotc("inspect", "products", "--store", folder / "store", "--json")
    (artifact,) = json.loads(ran.stdout)["artifacts"]
    assert any("_tile_dpbf16ps" in kernel.get("source", "") for kernel in artifact["variants"][0]["kernels"])
    assert run_python(SERVE, folder, "given").split() == ["served"]


def test_a_process_that_gets_no_tiles_is_told_so_and_not_killed(folder: Path) -> None:
    """Linux gives none where a thread's stack for signals is too small to save them."""
    said = run_python(SERVE, folder, "refused")
    assert said.startswith("refused") and "this CPU has no amx_bf16, amx_int8, amx_tile" in said
    assert "the kernel refuses AMX to this process" in said and "cpu:x86-64-v4" in said
