"""Timing with exclusive use of the device, over all processes of a machine: one benchmark at a time on each GPU, and on
the CPU one benchmark and nothing else of any build.

A benchmark on the CPU shares its cores with the compilers of the units beside it, so these are stopped meanwhile
(SIGSTOP), for the tenth of a second that it takes. A process that is killed while the others are stopped releases the
lock, and the process that watches over a unit continues it (`resume`).
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
import torch

from aotc.machine.locks import is_locked, lock, lock_file, waiting

POLL_SECONDS = 0.002
"""Between two tries to get a GPU that another unit is timing on: a benchmark takes some hundredths of a second."""


@contextmanager
def device_alone(device: torch.device | str) -> Iterator[None]:
    """Have the device to ourselves; units that compile side by side wait here for each other's benchmarks.

    The lock of a GPU is named by its UUID, so it holds whatever CUDA_VISIBLE_DEVICES calls the device.
    """
    if torch.device(device).type != "cuda":
        with _machine(), _others_stopped():
            yield
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    # A singleton, so that one benchmark inside another holds the same lock and does not wait for itself.
    path = Path(tempfile.gettempdir()) / f"aotc-{os.getuid()}-gpu-{uuid}.lock"
    gpu = filelock.FileLock(path, is_singleton=True)
    with _machine(shared=True):  # a stopped process times nothing
        with waiting("for the GPU, on which another unit measures"):
            gpu.acquire(poll_interval=POLL_SECONDS)
        try:
            yield
        finally:
            gpu.release()


def seconds_waited() -> float:
    """How long the threads of this process have been ready to run and waited for a CPU; 0 where Linux does not tell."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has ended
            total += int(path.read_text().split()[1])
    return total / 1e9


# -- calls on a GPU ---------------------------------------------------------------------------------------------------

ROUNDS = 9
ROUND_SECONDS = 0.02


def call_medians(*calls: Callable[[], Any]) -> tuple[float, ...]:
    """The median milliseconds per call of each, over rounds that take turns; calls in a round are back to back."""
    repeats = [max(5, int(ROUND_SECONDS / max(_round(call, 5), 1e-6))) for call in calls]
    rounds: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for times, call, count in zip(rounds, calls, repeats, strict=True):
            times.append(_round(call, count) * 1e3)
    return tuple(statistics.median(times) for times in rounds)


def _round(call: Callable[[], Any], count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


# -- units that can be stopped ----------------------------------------------------------------------------------------


@contextmanager
def stoppable(session: int) -> Iterator[None]:
    """While active, CPU benchmarks of other processes may stop the processes of this session, which must be one of our
    own."""
    folder = _folder()
    if folder is None:
        yield
        return
    path = folder / str(session)
    with lock_file(path, 0o600) as own:  # a number without this lock may be another process's by now
        lock(own)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()


def resume(session: int) -> None:
    """Resume a session, unless a running benchmark has stopped it."""
    folder = _folder()
    if folder is None:
        return
    with lock_file(folder / "lock", 0o600) as machine:
        if lock(machine, wait=False):
            _signal(session, signal.SIGCONT)


@contextmanager
def _machine(shared: bool = False) -> Iterator[None]:
    """Hold the machine's lock: exclusively, or shared with other holders, which must not be stopped."""
    folder = _folder()
    if folder is None:
        yield
        return
    with lock_file(folder / "lock", 0o600) as machine:
        with waiting("for a benchmark of another unit"):
            lock(machine, shared=shared)
        yield


@contextmanager
def _others_stopped() -> Iterator[None]:
    folder = _folder()
    names = [path for path in folder.iterdir() if path.name.isdecimal()] if folder else []
    own = os.getsid(0)
    stopped = [int(path.name) for path in names if int(path.name) != own and _is_held(path)]
    try:
        for session in stopped:
            _signal(session, signal.SIGSTOP)
        yield
    finally:
        for session in stopped:
            _signal(session, signal.SIGCONT)


def _signal(session: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(session, number)


def _is_held(path: Path) -> bool:
    with suppress(OSError):  # it has ended meanwhile
        return is_locked(path)
    return False


def _folder() -> Path | None:
    """Where this user's units of this machine are known; of the same process numbers, as containers may share /tmp.

    None where it is not ours alone: then no process is stopped.
    """
    namespace = "".join(filter(str.isdigit, str(Path("/proc/self/ns/pid").readlink())))
    folder = Path(tempfile.gettempdir()) / f"aotc-{os.getuid()}-units-{namespace}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if folder.is_dir() and not folder.is_symlink() and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return folder
    return None
