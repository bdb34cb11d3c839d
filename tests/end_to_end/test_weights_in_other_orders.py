"""A model put into `channels_last`, from its calls or its factory to the code that it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import run_here

import aotc
from aotc.manifest import read_manifest
from aotc.models.factory import build_modules

NETS = """\
import torch
from torch import nn


class Pixels(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.width = width
        self.conv = nn.Conv2d(3, width, 3)

    def forward(self, x):
        return self.conv(x).relu()


def last():
    return Pixels().to(memory_format=torch.channels_last).eval()


def call():
    return torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "pixel_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pixel_nets", raising=False)
    return __import__("pixel_nets")


@pytest.mark.compile
def test_a_module_in_channels_last_is_built_as_it_is(nets: Any, tmp_path: Path) -> None:
    module, x = nets.last(), nets.call()
    recorded, first = tmp_path / "recorded.yaml", tmp_path / "first.yaml"
    with torch.no_grad(), aotc.record(recorded, {"recorded": module}, check=False):
        expected = module(x)
    given = {"given": "pixel_nets:Pixels"}  # whose weights lie as usual
    with torch.no_grad(), aotc.record(tmp_path / "given.yaml", {"given": module}, factories=given, check=False):
        module(x)
    arguments = ("init", "pixel_nets.py:last", "--call", "pixel_nets.py:call", "--no-check", "--output", first)
    ran = run_here(*arguments, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for name in ("recorded", "given", "first"):
        manifest = read_manifest(tmp_path / f"{name}.yaml")
        ((model, spec),) = manifest.models.items()
        made: Any = build_modules(manifest)[model]
        assert made.conv.weight.stride() == module.conv.weight.stride() == (27, 1, 9, 3)
        assert spec.inputs["x"]["layout"] == "channels_last"
        assert spec.kwargs.get("memory_format") == ("channels_last" if name != "first" else None)
    for manifest_file, model in ((recorded, "recorded"), (first, "last")):
        store = tmp_path / f"{model}-store"
        ran = run_here("build", manifest_file, "--store", store, "--jobs", "1", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        compiled = aotc.load(model, module, store=store, on_miss="error")
        with torch.no_grad():
            result = compiled(x)
        assert result.stride() == expected.stride() and torch.allclose(result, expected, atol=1e-5)
        assert compiled.stats().misses == 0 and compiled.stats().calls == 1
