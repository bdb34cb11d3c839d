"""What was done to a module, and how its calls lie in memory: from `aotc.record` to the code that runs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import run_here
from torch import nn

import aotc
from aotc.manifest import read_manifest

peft = pytest.importorskip("peft")

NETS = """\
import functools

from torch import nn


class Scaled(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.linear(x)).tanh()


def without_mask(decorated):
    @functools.wraps(decorated)
    def wrapper(self, x, position=None, **more):
        return decorated(self, x, more.get("mask"), position)

    return wrapper


class Decoder(Scaled):
    @without_mask
    def forward(self, x, mask=None, position=None):
        x = self.linear(x)
        x = x if mask is None else x * mask
        return x if position is None else x + position
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "nets_as_they_are.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nets_as_they_are", raising=False)
    return __import__("nets_as_they_are")


@pytest.mark.compile
def test_slices_adapters_and_wrappers_are_recorded_built_and_called(nets: Any, tmp_path: Path) -> None:
    x = torch.randn(4, 9)[:, :-1]
    lora = peft.LoraConfig(target_modules=["linear"], r=2, lora_dropout=0.0, init_lora_weights=False)
    adapted = nets.Scaled().eval()
    peft.inject_adapter_in_model(lora, adapted, "one")  # whose layers are in training mode
    modules: dict[str, nn.Module] = {
        "sliced": nets.Scaled().eval(),
        "adapted": adapted,
        "decoder": nets.Decoder().eval(),
    }
    given = {"sliced": (x,), "adapted": (x.contiguous(),), "decoder": (x.contiguous(), torch.ones(4, 8))}
    with torch.no_grad(), aotc.record("recorded.yaml", modules, check=False):
        expected = {name: module(*given[name]) for name, module in modules.items()}
    specs = read_manifest("recorded.yaml").models
    assert [name for name, spec in specs.items() if spec.make_contiguous] == ["sliced"]
    assert specs["decoder"].inputs.keys() == {"x", "position"}
    ran = run_here("build", "recorded.yaml", "--store", tmp_path / "store", "--jobs", "1", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name, module in modules.items():
        compiled = aotc.load(name, module, store=tmp_path / "store", on_miss="error")
        with torch.no_grad():
            results = [compiled(*given[name])]
            if name == "decoder":
                results.append(compiled(given[name][0], position=given[name][1]))
                with pytest.raises(aotc.MissError):
                    compiled(given[name][0], mask=given[name][1])
        assert all(torch.allclose(result, expected[name], atol=1e-6) for result in results)
        assert compiled.stats().calls == len(results)
        assert compiled.stats().misses == (name == "decoder")
