"""The threads of a call, which are OpenMP's."""

from __future__ import annotations

import functools
import os

from aotc.standalone.cpu_environment import open_cpu

_SPINNING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_MOST_IDLE = 8


def set_num_threads(count: int) -> None:
    """How many threads a call that this thread makes uses, as `torch.set_num_threads`. Raises ValueError below 1."""
    if count < 1:
        raise ValueError(f"{count} threads were asked for, and a call needs one")
    open_cpu().threads(count)


@functools.cache
def spin_briefly() -> bool:
    """Let OpenMP's threads wait for each other for microseconds and not milliseconds, once in a process; the reason and
    the way are those of `aotc.runtime.libraries.openmp`."""
    threads = open_cpu().threads()
    spare = max(len(os.sched_getaffinity(0)) - threads, 0)
    if threads == 1 or any(name in os.environ for name in _SPINNING) or spare + 2 > _MOST_IDLE:
        return False
    return bool(open_cpu().add_idle_teams(spare + 2))
