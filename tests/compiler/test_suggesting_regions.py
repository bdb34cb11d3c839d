"""`aotc build --suggest-regions`: what repeats and can be captured, without what cannot."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from processes import ZOO

from aotc.cli import main
from aotc.compiler.capture.regions.suggest_regions import Suggestion, suggest_regions
from aotc.manifest import ModelSpec


def suggested(factory: str, shape: list[object]) -> Suggestion:
    spec = ModelSpec(
        name="tried", factory=f"region_models.py:{factory}", inputs={"x": {"shape": shape}}, buckets=({"n": 2},)
    )
    return suggest_regions(spec, ZOO)


def test_repeated_blocks_are_suggested_and_what_fails_is_named() -> None:
    found = suggested("Stack", ["n", 8])
    assert found.regions == ("blocks.*", "gates.*")
    assert [(tried.pattern, tried.count, tried.kinds) for tried in found.candidates] == [
        ("blocks.*", 3, 1),
        ("gates.*", 2, 1),
    ]
    assert found.whole is not None and found.whole.where == ""
    assert "in forward: if x.abs().max().item() > 1e6" in found.whole.line


def test_blocks_that_fail_themselves_are_left_for_what_is_inside_of_them() -> None:
    found = suggested("Deep", ["n", 4])
    assert found.regions == ("layers.*.body",)
    assert found.whole is not None and found.whole.where == "layers.0"
    first = found.candidates[0]
    assert first.pattern == "layers.*"
    assert "in `layers.0`" in first.problem and "if x.sum() > 0" in first.problem


def test_a_model_that_exports_is_said_to() -> None:
    assert suggested("Acts", ["n", 4]).whole is None


def test_the_share_of_the_time_within_the_regions_is_told(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from torch import nn\n"
        "class Slow(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Identity()\n"
        "    def forward(self, x):\n"
        "        time.sleep(0.06)\n"
        "        return self.inner(x)\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body = nn.Sequential(Slow(), Slow())\n"
        "        self.head = nn.Identity()\n"
        "    def forward(self, x):\n"
        "        x = self.body(x)\n"
        "        time.sleep(0.12)\n"
        "        return self.head(x) if x.sum() > 0 else x\n"
    )
    spec = ModelSpec(name="slow", factory="slow.py:Model", inputs={"x": {"shape": [2]}}, buckets=({},))
    found = suggest_regions(spec, tmp_path)
    assert found.regions == ("body.*",) and found.eager == ("head",)
    assert 0.25 < found.time < 0.75


def test_the_command_prints_lines_for_the_manifest(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    (tmp_path / "region_models.py").write_text((ZOO / "region_models.py").read_text())
    manifest.write_text(
        "version: 1\nmodels: {deep: {factory: 'region_models.py:Deep', inputs: {x: {shape: [2, 4]}}}}\n"
    )
    arguments = ["build", str(manifest), "--suggest-regions", "--store", str(tmp_path / "store")]
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0, shown.output
    assert '  deep:\n    regions: ["layers.*.body"]\n' in shown.output
    assert "deep: does not export as a whole: in `layers.0`, region_models.py:" in shown.output
    assert " of the time of a call in eager" in shown.output
    assert json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)[0]["regions"] == ["layers.*.body"]
    assert not (tmp_path / "store").exists()
    manifest.write_text(manifest.read_text().replace("deep: {", "deep: {weights: frozen, "))
    assert "\n    weights: live " in CliRunner().invoke(main, arguments).stdout
