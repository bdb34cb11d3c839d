"""FSDP2 of a model of which regions are compiled, on two ranks: over gloo (`training/test_gradients.py`) and NCCL
(`cuda/test_cuda_training.py`)."""

from __future__ import annotations

import json
from pathlib import Path

from processes import ROOT, finish, start

from aotc.verify.rank_processes import variables_of_ranks


def assert_sharded_as_whole(store: Path, device: str, tolerance: float, **variables: str) -> None:
    """Forward, backward and a step of SGD are those of the whole model in eager, over the batches of both ranks."""
    with variables_of_ranks(2) as ranks:
        script = ROOT / "tests" / "training" / "sharded.py"
        started = [start(script, store, device, OMP_NUM_THREADS="1", **variables, **rank) for rank in ranks]
        ran = [finish(process) for process in started]
    assert [each.returncode for each in ran] == [0, 0], ran[0].stderr + ran[1].stderr
    for said in (json.loads(each.stdout.splitlines()[-1]) for each in ran):
        assert said["without"] == []
        assert len(said["gradients"]) == 10
        assert max(*said["gradients"].values(), *said["steps"].values(), said["after"]) < tolerance
        assert said["calls"] == 6
