"""Parallel models on two GPUs, or four, with NCCL, collectives within CUDA graphs: as with gloo (`rank_suite.py`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml
from processes import run_aotc
from rank_suite import EXAMPLE, RankSuite

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

LAYERED = 4 if torch.cuda.device_count() >= 4 else 2
"""Ranks of the model by regions."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel") / "example"
    shutil.copytree(EXAMPLE, folder)
    manifest = folder / "manifest.yaml"
    models = yaml.safe_load(manifest.read_text())["models"]
    models["llama"]["graph_sizes"] = {"seq": [5]}
    models["llama-layers"]["parallel"] = {"model": LAYERED}
    defaults = {"cuda_graphs": "always", "targets": ["cuda"]}
    manifest.write_text(yaml.safe_dump({"version": 1, "defaults": defaults, "models": models}))
    ran = run_aotc("build", manifest, "--store", folder / "store", "--jobs", "6")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder / "store"


class TestWithNCCL(RankSuite):
    device = "cuda"
    tolerance = 1e-4
    seconds = 5
    layered = LAYERED
    verified = ("llama", "feed-forward", "embedding", "llama-layers")
    variables: ClassVar[dict[str, str]] = {"NCCL_NVLS_ENABLE": "0"}  # multicast needs rights that a container may lack

    def test_a_group_with_graphs_can_be_destroyed(self, store: Path) -> None:
        assert all(said["destroyed"] for said in self.run(store, "destroyed"))
