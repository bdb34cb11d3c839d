"""Models whose code prints, leaves processes behind, sets Inductor's options, refuses a precision, or takes its inputs
by `**kwargs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from doctoring import copy_store
from in_process import build_here
from processes import ZOO, run_aotc
from torch import Tensor, nn

from aotc.compiler.publish import bundles
from aotc.compiler.workers.process_failure import hint_of
from aotc.compiler.workers.unit_servers import SMOKE
from aotc.errors import BuildError
from aotc.manifest import read_manifest
from aotc.models.signature import make_signature

UNRULY = """
import multiprocessing, os, time
import torch
from torch import nn

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, **more):
        if x.dtype == torch.float64:
            raise TypeError("no float64")
        self.calls.add_(1)
        return x * self.calls + more["one"] - more["two"]

def fail(graph):
    raise AssertionError("a pass that is not in the manifest")

def unruly():
    print("printed by Python")
    import torch._inductor.config as config
    config.post_grad_custom_pre_pass, config.coordinate_descent_tuning = fail, True  # as torchao's `quantize_` does
    os.write(1, b"written by something else\\n")
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,), daemon=True).start()
    return Counting()
"""
INPUTS = {name: {"shape": ["n", 4]} for name in ("x", "two", "one")}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    model = {"factory": "unruly.py:unruly", "mode": "default", "inputs": INPUTS, "buckets": [{"n": 2}]}
    (tmp_path / "unruly.py").write_text(UNRULY)
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"unruly": model}}))
    return tmp_path / "manifest.yaml"


def test_what_a_model_prints_or_leaves_running_disturbs_nothing(manifest: Path, tmp_path: Path) -> None:
    """Results are alone on standard output, and nobody waits for what a factory has started."""
    ran = run_aotc("build", manifest, "--store", tmp_path / "store", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (unit,) = json.loads(ran.stdout)["units"]
    assert unit["status"] == "built"
    (note,) = (note for note in unit["notes"] if "options of Inductor" in note)
    assert "coordinate_descent_tuning: True" in note and "post_grad_custom_pre_pass: <function fail" in note
    assert "printed by Python" in ran.stderr and "written by something else" in ran.stderr
    verified = run_aotc("verify", manifest, "--store", tmp_path / "store", "--json", cwd=tmp_path)
    # It counts its calls and cannot be run in float64: its reference is eager, of the same count.
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert [report["status"] for report in json.loads(verified.stdout)] == ["ok"]


class Gathers(nn.Module):
    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return sum(more.values(), x)


def test_inputs_that_go_through_kwargs_have_one_order(tmp_path: Path) -> None:
    names = [f"more_{name}" for name in "qwertyuiop"]
    for given in (names, names[::-1]):
        inputs = {name: {"shape": [2]} for name in ["x", *given]}
        model = {"factory": "torch.nn:ReLU", "inputs": inputs, "buckets": [{}]}
        path = tmp_path / "manifest.yaml"
        path.write_text(yaml.safe_dump({"version": 1, "models": {"m": model}}, sort_keys=False))
        signature = make_signature(read_manifest(path).models["m"], Gathers())
        assert [parameter.name for parameter in signature.parameters] == ["x", *sorted(names)]


def test_a_model_whose_units_do_not_go_together_keeps_no_other_from_being_published(
    zoo_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_store(zoo_store, tmp_path)
    manifest = read_manifest(ZOO / "manifest.yaml", ["linear", "pooled"])
    merge: Any = bundles.merge

    def refuses_linear(artifacts: Any) -> Any:
        artifacts = list(artifacts)
        if artifacts[0].model == "linear":
            raise BuildError("they differ")
        return merge(artifacts)

    monkeypatch.setattr(bundles, "merge", refuses_linear)
    report = build_here(manifest, store.path, tag="beside")
    assert list(report.bundles) == ["pooled"]
    assert {outcome.model for outcome in report.failed} == {"linear"}
    assert all(str(outcome.error) == "they differ" for outcome in report.failed)
    assert [str(entry) for entry in store.tags() if entry.tag == "beside"] == ["pooled:beside"]


def test_the_hint_is_the_error_s_own_and_else_of_what_was_logged_since(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("CUDA out of memory while a candidate was tried\n")
    before = log.stat().st_size
    assert hint_of(SMOKE, "", tmp_path, log, before) == ""
    assert hint_of(SMOKE, "", tmp_path, log, 0)
    assert hint_of(SMOKE, "its own", tmp_path, log, 0) == "its own"
