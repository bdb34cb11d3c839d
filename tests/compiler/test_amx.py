"""Code for AMX's tiles. Where this CPU has none: nothing is measured or run, and a load is told so. Where it has: Linux
gives them to a process that asks, and the build and a service do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from in_process import run_here
from processes import run_python

import aotc
from aotc.compiler.planning.plan import plan_units
from aotc.machine.environment import cpu_features
from aotc.machine.targets import CPU_FEATURES
from aotc.manifest import read_manifest

TILES = "amx_tile" in cpu_features()
MANIFEST = """
version: 1
models:
  products:
    factory: tiled.py:Products
    dtype: bfloat16
    targets: [cpu:x86-64-v3, cpu:amx]
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


class Built(NamedTuple):
    folder: Path
    said: str

    def kernels(self) -> list[str]:
        """The sources of the unit's kernels."""
        ran = run_here("inspect", "products", "--store", self.folder / "store", "--json")
        (variant,) = json.loads(ran.stdout)["artifacts"][0]["variants"]
        return [kernel.get("source", "") for kernel in variant["kernels"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("amx")
    (folder / "tiled.py").write_text(MODELS)
    (folder / "manifest.yaml").write_text(MANIFEST)
    return folder


@pytest.fixture(scope="module")
def built(folder: Path) -> Built:
    """The model for a CPU with AMX, whether this one has it or not."""
    ran = run_here("build", "manifest.yaml", "--target", "cpu:amx", "--store", folder / "store", cwd=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return Built(folder, ran.stdout)


def test_a_unit_for_a_cpu_that_is_not_here_names_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(folder / "manifest.yaml")
    monkeypatch.setattr("aotc.compiler.planning.plan.cpu_features", lambda: frozenset(CPU_FEATURES["cpu:x86-64-v4"]))
    v3, amx = plan_units(manifest)
    assert v3.runs_here and not v3.untuned and "cpu" not in v3.factors
    assert not amx.runs_here and amx.untuned
    assert amx.absent == ("amx_bf16", "amx_int8", "amx_tile", "avx512_bf16", "avx512_vnni")

    monkeypatch.setattr("aotc.compiler.planning.plan.cpu_features", lambda: frozenset(CPU_FEATURES["cpu:amx"]))
    assert plan_units(manifest)[0].key == v3.key
    assert plan_units(manifest)[1].key != amx.key  # a machine with AMX does not take code that has not run


def test_its_code_has_tiles(built: Built) -> None:
    assert any("_tile_dpbf16ps" in source for source in built.kernels())


@pytest.mark.skipif(TILES, reason="needs a CPU without AMX")
def test_its_code_is_marked_as_untested(built: Built) -> None:
    """The tile kernel would end the smoke run: this CPU has no such instruction."""
    assert "untested: this CPU has no amx_bf16, amx_int8, amx_tile" in built.said
    where = built.folder / "store"
    assert "built without such a CPU; it has never run" in run_here("inspect", "products", "--store", where).stdout
    with pytest.raises(aotc.EnvironmentMismatchError, match="this CPU has no amx_bf16, amx_int8, amx_tile"):
        aotc.load(f"{where}#products", torch.nn.Identity(), trust=aotc.Trust(allow_untested=True))


SERVE = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import torch, aotc, tiled

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(4096)  # too small for the tiles, which a signal's handler would have to save
if sys.argv[2] == "refused":
    assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
module, x = tiled.Products().eval().bfloat16(), torch.randn(16, 8, 32, dtype=torch.bfloat16)
try:
    compiled = aotc.load(sys.argv[1] + "/store#products", module)
except aotc.EnvironmentMismatchError as error:
    print("refused", error)
else:
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x), rtol=0.02, atol=0.02)
    print("served")
"""


with_tiles = pytest.mark.skipif(not TILES, reason="needs AMX: this machine's CPU has none, or its kernel refuses it")


@with_tiles
def test_it_is_served(built: Built) -> None:
    assert run_python(SERVE, built.folder, "given").split() == ["served"]


@with_tiles
def test_a_process_that_gets_no_tiles_is_told_so_and_not_killed(built: Built) -> None:
    """Linux gives none where a thread's stack for signals is too small to save them."""
    said = run_python(SERVE, built.folder, "refused")
    assert said.startswith("refused") and "this CPU has no amx_bf16, amx_int8, amx_tile" in said
    assert "the kernel refuses AMX to this process" in said and "cpu:x86-64-v4" in said
