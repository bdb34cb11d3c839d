"""Parallel models on two GPUs with NCCL, collectives within CUDA graphs: as `tests/end_to_end/test_parallel.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from processes import ROOT, run_aotc
from ranks import run_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

EXAMPLE = ROOT / "examples" / "tensor_parallel"
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel") / "example"
    shutil.copytree(EXAMPLE, folder)
    manifest = folder / "manifest.yaml"
    models = yaml.safe_load(manifest.read_text())["models"]
    models["llama"]["graph_sizes"] = {"seq": [5]}
    models["llama-layers"]["parallel"] = {"tensor": 2}
    defaults = {"cuda_graphs": "always", "targets": ["cuda"]}
    manifest.write_text(yaml.safe_dump({"version": 1, "defaults": defaults, "models": models}))
    ran = run_aotc("build", manifest, "--store", folder / "store", "--jobs", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder / "store"


def test_two_ranks_compute_what_eager_and_the_whole_model_do(store: Path) -> None:
    ranks = run_ranks(2, store, "agree", 5, "cuda", **WITHOUT_MULTICAST)
    for said in ranks:
        assert max(said["differences"]) < 1e-4
        assert said["compilers"] == []
        assert said["no group"][0] == "BindError"
        assert said["miss on all"][0] == "MissError"
    assert [said["one fails"][0] for said in ranks] == ["GroupError", "BindError"]
    assert [said["miss on one"][0] for said in ranks] == ["GroupError", "MissError"]
    assert ranks[0]["miss on one"][2] < 20
    assert [said["call after it"][0] for said in ranks] == ["GroupError", "GroupError"]


@pytest.mark.parametrize(("scenario", "step"), [("ends", "call"), ("absent", "load")])
def test_a_rank_that_is_gone_is_an_error_within_the_limit(store: Path, scenario: str, step: str) -> None:
    said, _ = run_ranks(2, store, scenario, 5, "cuda", **WITHOUT_MULTICAST)
    name, message, seconds = said[step]
    assert name == "GroupError", message
    assert seconds < 20


def test_a_group_with_graphs_can_be_destroyed(store: Path) -> None:
    assert all(said["destroyed"] for said in run_ranks(2, store, "destroyed", 5, "cuda", **WITHOUT_MULTICAST))


def test_verify_starts_the_ranks_itself(store: Path) -> None:
    ran = run_aotc("verify", "llama", "--store", store, "--seeds", "1", cwd=store.parent, **WITHOUT_MULTICAST)
    assert ran.returncode == 0, ran.stdout + ran.stderr
