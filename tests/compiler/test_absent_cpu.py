"""Building for a CPU whose instructions this machine lacks: nothing is measured or run, and a load is told so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import run_aotc

import aotc
from aotc.compiler.plan import plan_units
from aotc.machine.environment import cpu_features
from aotc.machine.targets import CPU_FEATURES
from aotc.manifest import read_manifest

MANIFEST = """
version: 1
models:
  products:
    factory: models.py:Products
    dtype: bfloat16
    targets: [cpu:x86-64-v3, cpu:amx]
    inputs: {x: {shape: [16, 8, 32]}}
    options: {max_autotune_gemm_backends: CPP} # else no kernel uses the tiles
"""
MODELS = """
import torch
from torch import nn

class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 32, 64))

    def forward(self, x):
        return torch.bmm(x, self.w).relu()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("absent-cpu")
    (folder / "models.py").write_text(MODELS)
    (folder / "manifest.yaml").write_text(MANIFEST)
    return folder


def test_a_unit_for_a_cpu_that_is_not_here_names_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(folder / "manifest.yaml")
    monkeypatch.setattr("aotc.compiler.plan.cpu_features", lambda: frozenset(CPU_FEATURES["cpu:x86-64-v4"]))
    v3, amx = plan_units(manifest)
    assert v3.runs_here and not v3.untuned and "cpu" not in v3.factors
    assert not amx.runs_here and amx.untuned
    assert amx.absent == ("amx_bf16", "amx_int8", "amx_tile", "avx512_bf16", "avx512_vnni")

    monkeypatch.setattr("aotc.compiler.plan.cpu_features", lambda: frozenset(CPU_FEATURES["cpu:amx"]))
    assert plan_units(manifest)[0].key == v3.key
    assert plan_units(manifest)[1].key != amx.key  # a machine with AMX does not take code that has not run


@pytest.mark.skipif("amx_tile" in cpu_features(), reason="needs a CPU without AMX")
def test_its_code_is_marked_as_untested(folder: Path) -> None:
    """The tile kernel would end the smoke run: this CPU has no such instruction."""
    where = folder / "store"
    ran = run_aotc("build", "manifest.yaml", "--target", "cpu:amx", "--store", where, cwd=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "untested: this CPU has no amx_bf16, amx_int8, amx_tile" in ran.stdout
    shown = json.loads(run_aotc("inspect", "products", "--store", where, "--json").stdout)
    (kernels,) = (variant["kernels"] for variant in shown["artifacts"][0]["variants"])
    assert any("_tile_dpbf16ps" in kernel.get("source", "") for kernel in kernels)
    assert "built without such a CPU; it has never run" in run_aotc("inspect", "products", "--store", where).stdout
    with pytest.raises(aotc.EnvironmentMismatchError, match="this CPU has no amx_bf16, amx_int8, amx_tile"):
        aotc.load(f"{where}#products", torch.nn.Identity(), allow_untested=True)
