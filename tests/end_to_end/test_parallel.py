"""Parallel models: one build, every rank loads it. Here with gloo; `tests/cuda/test_cuda_parallel.py` has NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rank_suite import EXAMPLE, RankSuite

from aotc.errors import CorruptError, ManifestError
from aotc.manifest import read_manifest
from aotc.manifest.types import ModelSpec
from aotc.models.factory import build_module
from aotc.models.fake_ranks import group_left
from aotc.models.signature import make_signature
from aotc.records import Parallel
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import each_file, read_artifact, read_bundle
from aotc.store.layout.check_record import check_record
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference
from aotc.tools.bisection.bisect_run import bisect_reports
from aotc.tools.inspection.artifact_picks import picks_of
from aotc.verify.rank_processes import compare_with_whole
from aotc.verify.verdicts import VerifyReport


@pytest.fixture(scope="session")
def store(shared_folder: Path, built: Any) -> Path:
    """The example's models: one process built them, which was not a rank of a real group."""
    folder: Path = built(shared_folder, "parallel-store", EXAMPLE / "manifest.yaml")
    return folder


def test_the_ranks_share_one_library_for_each_bucket(store: Path) -> None:
    opened = Store.open(store)
    (entry,) = read_bundle(opened, parse_reference("llama")).artifacts
    artifact = read_artifact(opened, entry)
    assert artifact.parallel == Parallel("tensor", 2)
    assert len(artifact.variants) == 2
    assert artifact.kinds == ()


@pytest.mark.parametrize("model", ["feed-forward", "embedding"])
def test_ranks_that_differ_have_a_library_each(store: Path, model: str) -> None:
    """By the shapes of their weights (5 columns on two ranks), or by a constant in their code."""
    opened = Store.open(store)
    (entry,) = read_bundle(opened, parse_reference(model)).artifacts
    artifact = read_artifact(opened, entry)
    first, second = artifact.of_rank(0), artifact.of_rank(1)
    assert [kind.parallel for kind in (first, second)] == [Parallel("tensor", 2, (rank,)) for rank in range(2)]
    shapes = [[spec.shape for spec in kind.state if spec.name.startswith("up.weight")] for kind in (first, second)]
    assert shapes == ([[(3, 32)], [(2, 32)]] if model == "feed-forward" else [[], []])
    libraries = [[file.digest for file in kind.variants[0].files] for kind in (first, second)]
    assert libraries[0] != libraries[1]
    held = {file.digest for file in each_file(artifact)}
    assert held >= {digest for digests in libraries for digest in digests}
    assert [read_built(opened, entry).of_rank(rank).variants[0].report is None for rank in range(2)] == [False, False]
    assert [picks.ranks for picks in picks_of(model, store)] == [(0,), (1,)]


def test_kinds_that_leave_a_rank_out_are_refused(store: Path) -> None:
    opened = Store.open(store)
    (entry,) = read_bundle(opened, parse_reference("embedding")).artifacts
    artifact = read_artifact(opened, entry)
    with pytest.raises(CorruptError, match="not each for some of its 2 ranks"):
        check_record(msgspec.structs.replace(artifact, kinds=()))


def test_ranks_that_compute_something_else_than_the_whole_model_are_found() -> None:
    """Here since one process is a group of fake ranks, whose sums are those of one rank."""
    spec = read_manifest(EXAMPLE / "manifest.yaml").models["llama"]
    with group_left():
        signature = make_signature(spec, build_module(spec, EXAMPLE))
        judged = compare_with_whole(spec, EXAMPLE, signature, {"seq": 3}, torch.device("cpu"))
    assert [one.ok for one in judged.values()] == [False]


NEEDS_ITS_GROUP = """
import torch

class Sized(torch.nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.size = group.size()

    def forward(self, x):
        return x * self.size
"""


def test_a_factory_that_makes_no_whole_model_is_told_how_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "needs_its_group.py").write_text(NEEDS_ITS_GROUP)
    spec = ModelSpec("sized", "needs_its_group.py:Sized", {"x": {"shape": [2]}}, ({},), parallel={"tensor": 2})
    with group_left():
        signature = make_signature(spec, build_module(spec, tmp_path))
        with pytest.raises(ManifestError, match=r"(?s)has no attribute 'size'.*is called without its `group`"):
            compare_with_whole(spec, tmp_path, signature, {}, torch.device("cpu"))


def test_a_bisection_of_a_model_in_ranks_says_what_to_bisect(store: Path) -> None:
    bundle = read_bundle(Store.open(store), parse_reference("llama"))
    report = VerifyReport("llama", "seq=1", bundle.artifacts[0].target, "seq=1", "failed", bundle=bundle.digest)
    ((_, found),) = bisect_reports(str(store), [report], EXAMPLE, 1)
    assert "the model is split over ranks" in found.conclusion


@pytest.mark.skipif(torch.cuda.is_available(), reason="a native build is for the GPU: cuda/test_cuda_parallel.py")
class TestWithGloo(RankSuite):
    """Two ranks, and four of the model by regions."""
