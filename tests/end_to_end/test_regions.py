"""Regions, compiled: equal blocks once, each with its own weights, with no compiler in the service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doctoring import artifact_of
from in_process import run_here
from processes import ZOO, run_python
from test_no_compiler import BAN

from aotc.store.layout.store import Store
from aotc.store.layout.units import load_unit

MANIFEST = ZOO / "regions.yaml"

SERVE = """
import copy, sys
import torch
import aotc, region_models

torch.manual_seed(0)
module = region_models.Stack().eval()
for part in [*module.blocks, *module.gates]:
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter)
eager = copy.deepcopy(module)
compiled = aotc.load("stack", module, store=sys.argv[1])

def same(rows):
    x = torch.randn(rows, 8)
    with torch.no_grad():
        expected = eager(x)
    given = compiled(x)
    assert torch.allclose(given["x"], expected["x"], atol=1e-5), rows
    assert len(given["gates"]) == 2 and all(map(torch.allclose, given["gates"], expected["gates"]))

for rows in (1, 2, 8, 63, 64):
    same(rows)
assert compiled.stats().calls == 5 * 5 and not compiled.stats().misses
assert [int(gate.calls) for gate in module.gates] == [5, 5] == [int(gate.calls) for gate in eager.gates]

with torch.no_grad():  # one instance's weights are its own, and live
    for stack in (module, eager):
        stack.blocks[1].linear.weight.mul_(-2)
same(8)

module.load_state_dict({name: tensor * 0.5 for name, tensor in module.state_dict().items()})
eager.load_state_dict(module.state_dict())
same(8)

compiled.update_weights({name: tensor * 3 for name, tensor in eager.named_parameters()})
eager.load_state_dict({name: tensor * 3 for name, tensor in eager.named_parameters()}, strict=False)
same(8)
assert torch.equal(module.blocks[2].linear.weight, eager.blocks[2].linear.weight)

try:
    compiled(torch.randn(65, 8))
except aotc.MissError as error:
    assert "stack blocks.0" in str(error) and "n is 65, the bucket takes 1..64" in str(error), error
else:
    raise AssertionError("65 rows ran")
for when in ("after", "before"):  # a load
    module.blocks[1]._active = ["minus"]
    try:
        compiled(torch.randn(8, 8)) if when == "after" else aotc.load("stack", module, store=sys.argv[1])
    except aotc.BindError as error:
        assert "_active" in str(error) and "stack" in str(error) and "minus" in str(error), error
    else:
        raise AssertionError(when)
    module.blocks[1]._active = ["plus"]
same(8)
compiled.refresh()
same(8)
compiled.detach()

pooled = region_models.Pooled().eval()
padded, unpadded = aotc.load("padded", pooled, store=sys.argv[1]), copy.deepcopy(pooled)
unpadded.layers[0].__dict__.pop("forward", None), unpadded.layers[1].__dict__.pop("forward", None)
for n, seq in ((2, 8), (1, 5), (2, 3), (1, 8)):
    x, mask = torch.randn(n, seq, 8), torch.arange(seq) < torch.tensor([[seq], [2]])[:n]
    with torch.no_grad():
        expected = unpadded(x, mask)
    for given in (padded(x, mask), padded(mask=mask, x=x)):
        assert given["x"].shape == (n, seq, 8) and given["parts"][1] == 8, given
        assert torch.allclose(given["x"], expected["x"], atol=1e-5), (n, seq)
        assert torch.allclose(given["parts"][0], expected["parts"][0], atol=1e-5), (n, seq)
assert padded.stats().calls == 4 * 2 * 2 and padded.explain(x, mask).bucket == "n=2,seq=8"
try:
    padded(torch.randn(3, 8, 8), torch.ones(3, 8, dtype=torch.bool))
except aotc.MissError as error:
    assert "padded layers.0" in str(error) and "[3, 8, 8] came" in str(error), error
else:
    raise AssertionError("3 rows ran")

lenient = aotc.load("stack", module, store=sys.argv[1], on_miss="eager")
x = torch.randn(65, 8)
with torch.no_grad():
    assert torch.equal(lenient(x)["x"], eager(x)["x"])
assert lenient.stats().misses == 5
print("served", lenient)
"""


@pytest.mark.every_torch
def test_a_model_by_regions_is_served_where_no_compiler_can_be_imported(regions_store: Path, tmp_path: Path) -> None:
    shown = run_python(BAN + SERVE, regions_store, PATH="", CXX="/bin/false", AOTC_CACHE_DIR=str(tmp_path))
    assert shown.startswith("served <aotc.Compiled stack for ")
    assert shown.endswith(", 5 regions of 2 kinds>\n")


def test_equal_blocks_are_compiled_once(regions_store: Path) -> None:
    store = Store.open(regions_store)
    artifact = artifact_of(store, "stack")
    assert [variant.region for variant in artifact.variants] == ["blocks.0", "gates.0"]
    assert [region.instances for region in artifact.regions] == [
        ("blocks.0", "blocks.1", "blocks.2"),
        ("gates.0", "gates.1"),
    ]
    assert [[spec.name for spec in region.state] for region in artifact.regions] == [
        ["linear.bias", "linear.weight"],
        ["calls", "gate.bias", "gate.weight"],
    ]
    assert artifact.state == ()


def test_what_a_call_costs_is_measured_and_printed(regions_store: Path) -> None:
    units = [load_unit(path) for path in (regions_store / ".aotc" / "units").glob("*.json")]
    costs = {unit.artifact.variants[0].region: unit.cost for unit in units}
    assert {name: cost.calls for name, cost in costs.items() if cost} == {"blocks.0": 3, "gates.0": 2, "layers.0": 2}
    for cost in costs.values():
        assert cost is not None
        assert 0 < cost.passing_ms < cost.regions_ms
        assert cost.eager_ms > 0
    report = json.loads((regions_store.parent / "regions-store.json").read_text())
    notes = [note for unit in report["units"] for note in unit["notes"] if "SLOWER THAN EAGER" not in note]
    assert [note.partition("passing into it ")[2].partition(" slows")[0] for note in notes] == [
        "3 times",
        *["2 times"] * 2,
    ]


def test_it_is_verified_whole(regions_store: Path, tmp_path: Path) -> None:
    ran = run_here("verify", MANIFEST, "--store", regions_store, "--seeds", "1", "--json", AOTC_CACHE_DIR=str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    reports = json.loads(ran.stdout)
    assert {report["status"] for report in reports} == {"ok"}
    sizes = {report["sizes"] for report in reports}
    assert {"n=1", "n=2", "n=8", "n=64"} <= sizes
    assert {"n=2,seq=8", "n=1,seq=8", "n=2,seq=7", "n=2,seq=1"} <= sizes  # of a model whose calls are padded


def test_a_rebuild_compiles_nothing_and_a_changed_block_is_explained(regions_store: Path, tmp_path: Path) -> None:
    for name in ("region_models.py", "regions.yaml"):
        (tmp_path / name).write_text((ZOO / name).read_text())
    command = ["build", tmp_path / "regions.yaml", "--store", regions_store, "--dry-run", "--explain", "--json"]
    plan = json.loads(run_here(*command, cwd=tmp_path).stdout)
    assert [unit["cached"] for unit in plan] == [True, True, True]
    models = tmp_path / "region_models.py"
    models.write_text(models.read_text().replace("Block(width, index)", "Block(width, index if index < 2 else 7)"))
    plan = json.loads(run_here(*command, cwd=tmp_path).stdout)
    assert [unit["cached"] for unit in plan] == [False, False, False]
    assert [reason["message"] for reason in plan[0]["reasons"]] == [
        "source of region_models changed",
        "attributes changed",
    ]


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_it_can_be_looked_at(regions_store: Path, command: str) -> None:
    if command == "diff":
        assert run_here("diff", "stack", "stack", "--store", regions_store).returncode == 0
        return
    shown = run_here("inspect", "stack", "--store", regions_store).stdout
    assert "the rest of the model runs eagerly" in shown
    assert "blocks.0  3 instances, 2 tensors each: blocks.0, blocks.1, blocks.2" in shown
    assert "bucket gates.0 n=1..64" in shown
    assert "blocks.0 scale is 1.0" in shown
