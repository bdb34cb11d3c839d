"""What ranks of a parallel model promise: one suite over gloo (`end_to_end/test_parallel.py`) and NCCL
(`cuda/test_cuda_parallel.py`). Their `store` has the models of `examples/tensor_parallel`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from processes import ROOT, run_aotc
from ranks import run_ranks

EXAMPLE = ROOT / "examples" / "tensor_parallel"


class RankSuite:
    """`layered`: the ranks of the model by regions. `seconds`: how long ranks wait for one another, at most."""

    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-5
    seconds: ClassVar[int] = 3
    layered: ClassVar[int] = 4
    verified: ClassVar[tuple[str, ...]] = ("llama",)
    variables: ClassVar[dict[str, str]] = {}

    def run(self, store: Path, scenario: str, count: int = 2, seconds: int = 0) -> list[dict[str, Any]]:
        return run_ranks(count, store, scenario, seconds or self.seconds, self.device, **self.variables)

    @pytest.mark.every_torch
    def test_two_ranks_compute_what_eager_and_the_whole_model_do(self, store: Path) -> None:
        ranks = self.run(store, "agree")
        for said in ranks:
            assert max(said["differences"]) < self.tolerance
            assert said["compilers"] == []
            assert max(said["DTensors"]) < self.tolerance
            assert said["swap in the module"] == "BindError"
            assert max(said["constants"]) == 0  # each row is one rank's, and zeros are added
            assert said["no group"][0] == said["not a group"][0] == "BindError"
            assert "one of 2 ranks, and no group was given" in said["no group"][1]
            name, message, _ = said["other sizes"]
            assert name == "GroupError" and "(int64[1, 3], int64[])" in message and "(int64[1, 4], int64[])" in message
            assert said["miss on all"][0] == "MissError"
        # The load that fails on rank 1 fails on rank 0, too, before that waits in a collective.
        assert [said["one fails"][0] for said in ranks] == ["GroupError", "BindError"]
        assert "rank 1" in ranks[0]["one fails"][1] and "Llama" in ranks[0]["one fails"][1]
        # The one that waits for the other has an error within its time limit.
        assert [said["miss on one"][0] for said in ranks] == ["GroupError", "MissError"]
        assert ranks[0]["miss on one"][2] < 20
        assert [said["call after it"][0] for said in ranks] == ["GroupError", "GroupError"]

    def test_ranks_run_one_block_as_all_layers(self, store: Path) -> None:
        """A call of the module itself, which the other ranks do not make, has an error in time, too."""
        ranks = self.run(store, "regions", self.layered, 6)
        for said in ranks:
            assert max(said["differences"]) < self.tolerance
            assert said["calls"] == 6  # two, of three layers
            assert said["detached"]
            if self.layered > 2:
                assert said["another size"][0] == "BindError"
                assert "the group has 4 ranks, and `llama` was built for 2" in said["another size"][1]
                assert said["mesh"] < self.tolerance
        if self.layered > 2:
            loads = [said["load with a mesh"] for said in ranks]
            assert [name for name, *_ in loads] == ["", "", "GroupError", "NotFoundError"]
            assert loads[2][2] < 30 and "rank 1" in loads[2][1]
        name, message, seconds = ranks[0]["alone"]
        assert name == "GroupError", message
        assert seconds < 30

    @pytest.mark.parametrize(("scenario", "step"), [("ends", "call"), ("absent", "load")])
    def test_a_rank_that_is_gone_is_an_error_within_the_limit(self, store: Path, scenario: str, step: str) -> None:
        said, _ = self.run(store, scenario)
        name, message, seconds = said[step]
        assert name == "GroupError", message
        assert seconds < 20

    def test_verify_starts_the_ranks_itself(self, store: Path) -> None:
        """It compares each rank with eager, and the ranks with the whole model."""
        for model in self.verified:
            options = ("--store", store, "--seeds", "1", "--json")
            ran = run_aotc("verify", model, *options, cwd=EXAMPLE, OMP_NUM_THREADS="1", **self.variables)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            reports = json.loads(ran.stdout)
            assert {report["status"] for report in reports} == {"ok"}
            assert model != "llama" or {report["bucket"] for report in reports} == {"seq=1", "seq=2..32"}
