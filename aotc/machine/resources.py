"""Memory and cores: what the units' processes take and wait for, and what is free on this machine.

Read from Linux: psutil has no schedstat, no control groups and no limits of containers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from aotc.machine.benchmarking import resume

PERIOD = 0.2
"""Seconds between two samples: compilers run for seconds."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


class Family(NamedTuple):
    """The processes of one session: their private bytes, whether any of them is stopped, and by process number, for how
    many nanoseconds its main thread has been ready to run and waited for a core."""

    memory: int = 0
    stopped: bool = False
    core: Mapping[int, int] = {}


def families(sessions: Collection[int]) -> dict[int, Family]:
    """Each session's family. A process's private memory is resident, and neither shared nor mapped from a file.

    A unit's process begins a session, to which the compilers and workers that it starts belong.
    """
    found = dict.fromkeys(sessions, Family())
    for folder in _PROC.iterdir() if sessions else ():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):  # the process has ended meanwhile
            state, _, _, number, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if (session := int(number)) in found:
                _, resident, shared, *_ = map(int, (folder / "statm").read_text().split())
                memory, stopped, core = found[session]
                waited = {**core, int(folder.name): _waited(folder)}
                found[session] = Family(memory + (resident - shared) * _PAGE, stopped or state == "T", waited)
    return found


def _waited(process: Path) -> int:
    """The second number of schedstat; 0 where Linux does not tell."""
    try:
        return int((process / "schedstat").read_text().split()[1])
    except FileNotFoundError:
        return 0


class Taken(NamedTuple):
    """The peak of a family's bytes, and the seconds for which its processes waited for a core."""

    memory: int
    core: float


class MemoryWatch:
    """Records the peak memory of each family of processes, and for how long they waited for a core.

    A stopped process that no running benchmark has stopped is continued: the benchmark was killed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peaks: dict[int, int] = {}
        self._waited: dict[int, dict[int, int]] = {}  # by session and process
        self._told: dict[int, int] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, session: int) -> Iterator[None]:
        """While active, sample the family of this session."""
        with self._lock:
            self._peaks[session], self._waited[session], self._told[session] = 0, {}, 0
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="aotc memory", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                for known in (self._peaks, self._waited, self._told):
                    known.pop(session, None)

    def take(self, session: int) -> Taken:
        """What was recorded since the last call for this family; 0 where nothing was sampled."""
        self._look()
        with self._lock:
            if session not in self._peaks:
                return Taken(0, 0.0)
            peak, self._peaks[session] = self._peaks[session], 0
            waited = sum(self._waited[session].values())
            told, self._told[session] = self._told[session], waited
        return Taken(peak, (waited - told) / 1e9)

    def _look(self) -> None:
        for session, (memory, stopped, core) in families(tuple(self._peaks)).items():
            if stopped:
                resume(session)
            with self._lock:
                if session in self._peaks:
                    self._peaks[session] = max(self._peaks[session], memory)
                    self._waited[session].update(core)  # of a process that has ended, what it had by the last look

    def _run(self) -> None:
        """Sample until no family is watched."""
        while True:
            with self._lock:
                if not self._peaks:
                    self._thread = None
                    return
            self._look()
            self._wake.wait(PERIOD)


# -- this machine -----------------------------------------------------------------------------------------------------

_CGROUP = Path("/sys/fs/cgroup")


def cores_here() -> int:
    """The number of cores that this process may use: its affinity, limited by the container's quota."""
    affinity = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _cgroups("cpu") if (quota := _quota(folder)) is not None]
    return max(1, min([affinity, *(round(quota) for quota in quotas)]))


def memory_here() -> int:
    """The bytes that are free for new processes, within the limits of the container too."""
    free = [int(line.split()[1]) * 1024 for line in _lines(_PROC / "meminfo") if line.startswith("MemAvailable:")]
    for folder in _cgroups("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            numbers = [_number(folder / name) for name in (limit, used)]
            if numbers[0] is not None and numbers[1] is not None:
                # The kernel frees cached pages when a process needs memory.
                cached = sum(int(line.split()[1]) for line in _lines(folder / "memory.stat") if _is_cache(line))
                free.append(numbers[0] - numbers[1] + cached)
    return max(0, min(free, default=1 << 62))


def _is_cache(line: str) -> bool:
    return line.startswith(("inactive_file ", "total_inactive_file "))


def _cgroups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and its parents (version 2, or version 1's controller)."""
    for line in _lines(_PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP
        place = root / path.strip("/")
        yield from (folder for folder in (place, *place.parents) if folder.is_relative_to(root))


def _quota(folder: Path) -> float | None:
    """The quota in cores, from `cpu.max` or version 1's two files; None if unlimited."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = (_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
