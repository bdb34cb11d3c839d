"""How long OpenMP's threads wait for each other before they sleep.

At the end of each parallel loop of GNU's OpenMP (libgomp) the threads that are done spin for up to ten milliseconds.
Where other processes use the CPUs, or a container may use a part of them, these spin in the place of the thread that is
waited for. `OMP_WAIT_POLICY` and `GOMP_SPINCOUNT` set it, but only before torch is imported. libgomp spins for 40
microseconds where it manages more threads than there are CPUs: so a load gives it some that only sleep.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
MOST_THREADS = 8
"""Of those that sleep. More are needed where torch uses fewer threads than there are CPUs by as many."""

_log = logging.getLogger("aotc")


@functools.cache
def spin_briefly() -> bool:
    """Once in a process; not where one of `SETTINGS` says how long to spin, or torch uses one thread."""
    from aotc.runtime.native import open_core

    spare = len(os.sched_getaffinity(0)) - torch.get_num_threads()
    if torch.get_num_threads() == 1 or any(name in os.environ for name in SETTINGS) or (core := open_core()) is None:
        return False
    if spare + 2 > MOST_THREADS:
        _log.info("threads of OpenMP spin for milliseconds: to set OMP_WAIT_POLICY=passive saves CPU on a busy host")
        return False
    return bool(core.add_idle_teams(max(spare, 0) + 2))
