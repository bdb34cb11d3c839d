"""The ranks of a parallel model, in processes that `aotc verify` starts: each compares its own results.

Every rank takes the same steps in the same order, since each step waits in collectives for all. What a rank finds goes
to the others through the process group's store, and rank 0 reports the worst of it.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist

from aotc.errors import ManifestError, VerifyError
from aotc.manifest.types import ModelSpec
from aotc.models.calls import arguments_of, modes_of, signature_leaves
from aotc.models.factory import build_module, import_object
from aotc.models.fake_ranks import makes_unsharded
from aotc.models.tolerance import Judgement, judge
from aotc.records import Dims, Signature
from aotc.tensors.contents import contents
from aotc.verify.verdicts import VerifyReport

TIMEOUT = 300.0
"""Seconds that a rank waits for the others: in a load, in a call, and with a report."""


def size_of(spec: ModelSpec) -> int:
    """The number of ranks; 0 for a model that is not parallel."""
    return next(iter(spec.parallel.values()), 0)


@contextmanager
def variables_of_ranks(size: int) -> Iterator[list[dict[str, str]]]:
    """The variables of each rank's process, as torchrun sets them, for as long as this process has their store."""
    store = cast("Any", dist).TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    yield [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    del store  # which listened on a port that was free, all the time


class RankProcesses:
    """This process as one of the ranks."""

    def __init__(self, device: str) -> None:
        """Raises VerifyError where there are fewer GPUs than ranks."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if device == "cuda":
            if torch.cuda.device_count() < size:
                raise VerifyError(
                    f"the model has {size} ranks, and there are {torch.cuda.device_count()} GPUs here",
                    hint="verify it on a machine with a GPU for each rank",
                )
            torch.cuda.set_device(rank)
        limit = datetime.timedelta(seconds=TIMEOUT)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=limit)
        self.group = cast("Any", dist.group.WORLD)
        self.rank, self._size = rank, size
        self._store: Any = dist.distributed_c10d.PrefixStore("aotc verify", self.group.get_group_store())
        self._reports = 0

    def worst(self, report: VerifyReport) -> VerifyReport:
        """The report of the first rank at which something is wrong, else this rank's. All ranks must call it."""
        number, self._reports = self._reports, self._reports + 1
        self._store.set(f"{number}/{self.rank}", msgspec.json.encode(report).decode())
        try:
            self._store.wait(
                [f"{number}/{rank}" for rank in range(self._size)], datetime.timedelta(seconds=2 * TIMEOUT)
            )
        except RuntimeError:
            detail = "another rank has ended, or reported nothing in time"
            return msgspec.structs.replace(report, status="crashed", detail=report.detail or detail)
        for rank in range(self._size):
            other = msgspec.json.decode(self._store.get(f"{number}/{rank}"), type=VerifyReport)
            if other.status != "ok":
                return msgspec.structs.replace(other, detail=f"rank {rank}: {other.detail}")
        return report


def compare_with_whole(
    spec: ModelSpec, folder: Path, signature: Signature, dims: Dims, device: torch.device
) -> Mapping[str, Judgement]:
    """Judge this rank's eager results by those of the whole model, each from the factory's weights: by their paths,
    those that have the same shape in both. Empty where the factory makes no whole model. Raises ManifestError."""
    factory = import_object(spec.factory, folder)
    if not makes_unsharded(factory, spec.kwargs):
        return {}
    leaves = signature_leaves(spec, signature, dims, device, 0, folder)

    def run(module: torch.nn.Module) -> Mapping[str, Any]:
        own = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = arguments_of(signature, own)
        with torch.no_grad(), modes_of(spec, device.type):
            return contents(module.to(device)(*args, **kwargs))

    try:
        unsharded = build_module(spec, folder, unsharded=True)
    except ManifestError as error:
        raise ManifestError(
            error.message,
            hint="for the whole model, the factory is called without its `group`, `mesh`, `rank` and `world_size`: "
            "give these no defaults if it makes none",
        ) from error
    part, whole = run(build_module(spec, folder)), run(unsharded)
    judged = {}
    for path, value in part.items():
        other = whole.get(path)
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and value.shape == other.shape:
            judged[path] = judge(value, other, other)
    return judged
