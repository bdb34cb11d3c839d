"""The process that builds what was remembered of a module: the only module of this room that imports the compiler.

    python -m aotc.tools.remembering.build_process JOB.json

It outlives the process that started it, runs at a low priority, and waits while another one builds for the same module.
Killed, it leaves the units that it finished, and the next build takes them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aotc.errors import AotcError
from aotc.locks import lock, lock_file
from aotc.records import Dims
from aotc.tools.remembering.memory import Kind, Memory, Place

if TYPE_CHECKING:
    from aotc.compiler.workers.forks import ForkServers

NICENESS = 10
CHECK_SECONDS = 120.0
MOST_ATTEMPTS = 3
"""Builds in a row that may end without a result: what ends them, as too little memory, may be the build itself."""


class BuildJob(msgspec.Struct, frozen=True):
    """What to build: the memory called `name` in `folder`, into `store`. `cores` 0: all that this process may use."""

    folder: str
    name: str
    store: str
    seconds: float
    cores: int
    builds: int


def main() -> None:
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=BuildJob)
    Path(sys.argv[1]).unlink()
    os.nice(NICENESS)
    if job.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-job.cores :])
    place = Place(Path(job.folder), job.name)
    with lock_file(place.lock) as held:
        lock(held)
        memory = place.read()
        if memory is not None and memory.builds < job.builds and (kinds := place.unbuilt(memory)):
            _begin_log(place)
            _build(job, place, memory, kinds)


def _begin_log(place: Place) -> None:
    """From here on all output is the log: a process that only waited leaves that of the one that built."""
    with place.log.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _build(job: BuildJob, place: Place, memory: Memory, kinds: list[int]) -> None:
    if memory.attempts >= MOST_ATTEMPTS:
        for kind in kinds:
            place.fail(kind, f"{memory.attempts} builds in a row ended without a result; was memory short?")
        place.change(None, lambda memory: setattr(memory, "attempts", 0))
        return
    from aotc.compiler.workers.forks import ForkServers

    def begun(memory: Memory) -> None:
        memory.attempts += 1

    place.change(None, begun)
    left = {place.model(n): memory.kinds[n] for n in kinds}
    failed: dict[str, str] = {}
    try:
        with _ended_after(job.seconds), contextlib.closing(ForkServers()) as servers:
            servers.begin()  # they import torch and its compiler while this process does
            for wide in (True, False):
                try:
                    failed = _built(job, place, memory, left, servers, wide=wide)
                except Exception as error:  # of the user's code, which the build runs, too
                    traceback.print_exc()
                    known = isinstance(error, AotcError)
                    failed = dict.fromkeys(left, str(error) if known else f"{type(error).__name__}: {error}")
                left = {model: left[model] for model in failed}
                if not left or _manifest(place, memory, left, True) == _manifest(place, memory, left, False):
                    break
    except KeyboardInterrupt:
        failed = dict.fromkeys(left, f"the build took more than {job.seconds:g} s")
    for n in kinds:
        if reason := failed.get(place.model(n)):
            place.fail(n, reason)

    def ended(now: Memory) -> None:
        now.builds, now.attempts = now.builds + 1, 0
        for n in kinds:
            if place.model(n) not in failed:
                now.kinds[n].built = len(memory.kinds[n].calls)

    place.change(None, ended)


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt within, upon which a build ends its processes and keeps what it has finished."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _manifest(place: Place, memory: Memory, models: dict[str, Kind], wide: bool) -> tuple[str, dict[str, list[Dims]]]:
    from aotc.tools.remembering.manifest import manifest_of

    return manifest_of(memory, models, place.folder, wide=wide)


def _built(
    job: BuildJob, place: Place, memory: Memory, models: dict[str, Kind], servers: ForkServers, *, wide: bool
) -> dict[str, str]:
    """Build these models; the reasons of those that failed. Raises what the user's code raises, and AotcError."""
    from aotc.compiler.messages import Settings
    from aotc.compiler.mistakes import check_settings, read_checked
    from aotc.compiler.pipeline import build
    from aotc.compiler.request import BuildRequest
    from aotc.tools.recording.check_written import check_written

    text, sizes = _manifest(place, memory, models, wide)
    place.manifest.write_text(text)
    manifest = read_checked(place.manifest)
    sizes_of = (bucket.values() for spec in manifest.models.values() for bucket in spec.buckets)
    if not all(isinstance(size, int) for each in sizes_of for size in each):  # it mends ranges
        check_written(place.manifest, sizes, CHECK_SECONDS)
        manifest = read_checked(place.manifest)
    check_settings(manifest)
    if parts := [model for model, spec in manifest.models.items() if spec.regions]:
        reason = "cannot be captured whole, and aotc.compile builds no regions: see `# cannot be` in"
        return dict.fromkeys(parts, f"{reason} {place.manifest}")
    report = build(BuildRequest(manifest, Path(job.store), settings=Settings(jobs=job.cores or None)), servers)
    reasons = dict(report.unpublished)
    reasons |= {each.model: f"{each.bucket}: {each.error}" for each in report.failed}
    return {model: f"{reason}\nlog: {place.log}" for model, reason in reasons.items() if model not in report.bundles}


if __name__ == "__main__":
    main()
