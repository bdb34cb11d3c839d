"""Units on this machine: parallel processes, within its cores and its memory."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from aotc.compiler.messages import FinishedUnit, OnProgress, Task, Unit
from aotc.compiler.toolchain.precompiled_headers import ENOUGH_UNITS
from aotc.compiler.workers.process_group import Processes
from aotc.compiler.workers.shared_folder import SharedFolder
from aotc.compiler.workers.unit_process import compile_and_run, work_folder
from aotc.compiler.workers.unit_servers import ForkServers
from aotc.machine.resources import cores_here, memory_here

COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"

BASE = {"cpu": 11 << 27, "cuda": 5 << 30}
"""Bytes of a unit's processes without its weights: measured (`tests/benchmarks/build.py unit`), rounded up."""

WEIGHTS = 4
"""How many times a unit may hold the weights: the module, its export, constants that are folded, and examples."""


class LocalExecutor:
    """Compiles `jobs` units at a time, which divide the cores among their Inductor compile processes.

    With `share`, they also share picks and, for the targets of `precompiled`, precompiled headers.
    `servers` may already be importing.
    """

    def __init__(
        self,
        jobs: int,
        variables: Mapping[str, str | None] | None = None,
        *,
        share: bool = True,
        precompiled: Collection[str] = (),
        servers: ForkServers | None = None,
    ) -> None:
        threads = {} if COMPILE_THREADS in os.environ else {COMPILE_THREADS: str(math.ceil(cores_here() / jobs))}
        self._jobs = jobs
        self._processes = Processes({**threads, **(variables or {})}, servers)
        self.shared = SharedFolder() if share else None
        self._precompiled = precompiled

    @property
    def slots(self) -> int:
        return self._jobs

    @property
    def parallel(self) -> int:
        return self._jobs

    @contextmanager
    def compile(self, task: Task, on_progress: OnProgress) -> Iterator[FinishedUnit]:
        with work_folder() as work:
            precompile = task.unit.target.name in self._precompiled
            yield compile_and_run(task, work, self._processes, on_progress, shared=self.shared, precompile=precompile)

    def raise_if_ended(self) -> None:
        self._processes.raise_if_ended()

    def end(self) -> None:
        self._processes.end_all()

    def close(self) -> None:
        self._processes.close()
        if self.shared:
            self.shared.remove()


def jobs_for(units: Sequence[Unit], asked: int | None = None, used: Mapping[str, int] | None = None) -> int:
    """The number of units to compile at a time: `asked`, else one for each core, as memory allows.

    Never more than there are units: each gets its share of the cores. `used`: bytes of memory in an earlier build, by
    unit name.
    """
    if not units:
        return 1
    if asked:
        return min(asked, len(units))
    most = max((used or {}).get(unit.name, 0) or memory_of(unit) for unit in units)
    fitting = min(cores_here(), memory_here() // most)
    on_gpu = [unit for unit in units if unit.target.device == "cuda" and unit.gpu is None]
    if on_gpu:
        fitting = min(fitting, _fitting_gpu(on_gpu))
    return int(max(1, min(fitting, len(units))))


def targets_of_many(units: Sequence[Unit]) -> list[str]:
    """The CPU targets with enough units for precompiled headers to save time."""
    counts = Counter(unit.target.name for unit in units if unit.target.device == "cpu")
    return [name for name, count in counts.items() if count >= ENOUGH_UNITS]


def memory_of(unit: Unit) -> int:
    """Bytes to reserve for a unit that was not compiled before."""
    return BASE[unit.target.device] + WEIGHTS * unit.state_bytes


def _fitting_gpu(units: Sequence[Unit]) -> int:
    import torch

    most = max(unit.state_bytes for unit in units)
    # 3 GiB: the CUDA context, cuBLAS's workspaces and the tensors on which candidates are timed.
    return int(torch.cuda.mem_get_info()[0] // ((3 << 30) + 3 * most))
