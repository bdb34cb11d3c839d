"""One unit in processes of its own: a worker that compiles it, then a fresh one that runs the result once."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import msgspec

from aotc.compiler.autotune.pins import NO_PINS, Pins
from aotc.compiler.failure import hint_for
from aotc.compiler.job import Autotuned, Job
from aotc.compiler.plan import Unit
from aotc.compiler.publish.record import RECORD
from aotc.compiler.workers.forks import SMOKE, WORKER, Forked, ForkServers, unit_environment
from aotc.compiler.workers.memory import MemoryWatch
from aotc.compiler.workers.progress import STAGE, Doing, OnProgress, Span
from aotc.compiler.workers.shared_folder import SharedFolder
from aotc.errors import BuildError, Issue, StoreError
from aotc.machine.benchmarking import stoppable
from aotc.machine.processes import whole_lines, with_variables
from aotc.records import Artifact, Smoked, decode, decode_artifact
from aotc.store.disk import typed_errors
from aotc.store.locks import held_folder

R = TypeVar("R")

LOG_TAIL = 20_000
"""Characters at the end of a log in which a failed run's cause is looked for."""


class Built(NamedTuple):
    """What the processes gave: the artifact, its files in `folder`, what autotuning did, and the smoke run showed."""

    artifact: Artifact
    folder: Path
    autotuned: Autotuned
    smoked: Smoked


class Processes:
    """The processes of a build, so that all of them can be ended at once.

    `variables` are set for each of them, or unset where they are None.
    """

    def __init__(self, variables: Mapping[str, str | None] | None = None, servers: ForkServers | None = None) -> None:
        self.memory = MemoryWatch()
        self._variables = dict(variables or {})
        self._servers = servers or ForkServers()
        self._lock = threading.Lock()
        self._running: set[Forked] = set()
        self._ended = False

    @contextmanager
    def start(
        self, module: str, argument: str, environment: Mapping[str, str], log: Path, model: str = ""
    ) -> Iterator[Forked]:
        """A process for a unit of `model`, in a session of its own, whose whole family ends when the context does.

        Raises OSError.
        """
        environment = with_variables(environment, self._variables)
        self.raise_if_ended()
        try:
            with log.open("ab") as errors:
                process = self._started(module, argument, environment, errors, model)
        except OSError:
            self.raise_if_ended()  # which ends the servers
            raise
        with self._lock:
            self._running.add(process)
            if self._ended:
                _end_family(process)
        try:
            with self.memory.watching(process.pid), stoppable(process.pid):
                yield process
        finally:
            _end(process)
            with self._lock:
                self._running.discard(process)

    def _started(
        self, module: str, argument: str, environment: Mapping[str, str], errors: IO[bytes], model: str
    ) -> Forked:
        try:
            return self._servers.server(module, environment, model).start([argument], environment, errors)
        except ChildProcessError:  # the out-of-memory killer takes anything, and servers too: others are made
            return self._servers.server(module, environment, model).start([argument], environment, errors)

    def raise_if_ended(self) -> None:
        """Raises KeyboardInterrupt once the build is being ended."""
        if self._ended:
            raise KeyboardInterrupt

    def end_all(self) -> None:
        """End every process and refuse new ones."""
        with self._lock:
            self._ended = True
            for process in self._running:
                _end_family(process)
        self._servers.close()


def _end(process: Forked) -> None:
    _end_family(process)
    process.wait()
    process.stdout.close()


def _end_family(process: Forked) -> None:
    """Kill the process and whatever it started: compilers, and Inductor's own workers."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def compile_in_processes(
    unit: Unit,
    folder: Path,
    work: Path,
    log: Path,
    processes: Processes,
    on_progress: OnProgress,
    *,
    pins: Pins = NO_PINS,
    locked: bool = False,
    shared: SharedFolder | None = None,
    precompile: bool = False,
) -> Built:
    """The unit's artifact, its files staged in `work/out`, run once in a fresh process.

    Raises BuildError, StoreError.
    """
    _check_compilable(work)
    output = work / "out"
    output.mkdir(parents=True)
    job = work / "job.json"
    request = Job(
        spec=unit.spec,
        folder=str(folder),
        bucket=unit.bucket,
        target=unit.target.name,
        key=unit.key,
        output=str(output),
        pins=pins.own,
        seeds=pins.seeds,
        locked=locked,
        shared=str(shared.path) if shared else "",
        precompile=precompile,
        region=unit.region,
        regions=unit.regions,
        sizes=unit.sizes,
        sources=unit.factors["sources"],
    )
    job.write_bytes(msgspec.json.encode(request))
    with shared.kernels() if shared else nullcontext() as kernels:
        environment = unit_environment() | _caches(work, kernels)
        stages = _Stages(processes.memory, on_progress)

        def ran(module: str, stage: str) -> dict[str, Any]:
            stages.begin(stage)
            logged = log.stat().st_size if log.exists() else 0
            with ExitStack() as running:
                try:
                    process = running.enter_context(processes.start(module, str(job), environment, log, unit.spec.name))
                except OSError as error:
                    raise BuildError(
                        f"no process can be started: {error}",
                        hint="too little memory, or too many processes? try fewer --jobs",
                        unit=unit.name,
                        stage=stage,
                        log=str(log),
                    ) from error
                stages.watch(process.pid)
                status, said = _follow(process, stages.follow)
                stages.end()
                processes.raise_if_ended()
                _raise_if_failed(module, unit, status, said, work, log, logged)
            return said

        compiled = ran(WORKER, "import")
        smoked = _record(ran(SMOKE, "smoke run")["smoked"], Smoked)
    artifact = decode_artifact((output / RECORD).read_bytes())
    if smoked.launch is not None:
        variant = msgspec.structs.replace(artifact.variants[0], launch=smoked.launch)
        artifact = msgspec.structs.replace(artifact, variants=(variant,))
    return Built(artifact, output, _record(compiled["autotuned"], Autotuned), smoked)


def _follow(process: Forked, on_message: Callable[[Mapping[str, Any]], None]) -> tuple[int, dict[str, Any]]:
    """Follow a process's messages to its end: its exit status, and the last message, which says how it went."""
    last: dict[str, Any] = {}
    for line in whole_lines(process.stdout):
        message = cast("dict[str, Any]", json.loads(line))
        on_message(message)
        if not message.keys() & {"span", "doing"}:
            last = message
    return process.wait(), last


def _raise_if_failed(
    module: str, unit: Unit, status: int, last: Mapping[str, Any], work: Path, log: Path, logged: int
) -> None:
    """Raises BuildError for what a process said of its failure, or where it died; `logged` bytes were in its log."""
    if "failed" in last:
        failed = last["failed"]
        raise BuildError(
            failed["message"],
            hint=_hint(module, failed["hint"], work, log, logged),
            issues=tuple(_record(issue, Issue) for issue in failed.get("issues", ())),
            unit=unit.name,
            stage=failed["stage"],
            source=failed["source"],
            log=str(log),
        )
    if status != 0 or "done" not in last:
        raise _died(module, unit, status, str(last.get("stage", "start")), work, log)


class _Stages:
    """Follows the stages of a unit, each of which lasts until the next one begins."""

    def __init__(self, memory: MemoryWatch, on_progress: OnProgress) -> None:
        self._memory, self._on_progress = memory, on_progress
        self._processes: list[int] = []
        self._name, self._began = "", time.time()

    def watch(self, process: int) -> None:
        """Count the memory of this process and its family from now on."""
        self._processes.append(process)

    def follow(self, message: Mapping[str, Any]) -> None:
        """What a process says of itself."""
        if "stage" in message:
            self.begin(message["stage"])
        elif "doing" in message:
            self._on_progress(Doing(self._name, message["doing"]))
        elif "span" in message:
            self._on_progress(_record(message["span"], Span))

    def begin(self, name: str) -> None:
        if name != self._name:
            self.end()
            self._name, self._began = name, time.time()
            self._on_progress(Doing(name))

    def end(self) -> None:
        if self._name:
            seconds, memory = time.time() - self._began, self._memory.take(self._processes[-1])
            host, process = socket.gethostname(), self._processes[0]
            self._on_progress(Span(self._name, STAGE, self._began, seconds, host, process, process, memory))
            self._name = ""


def _record(message: Any, kind: type[R]) -> R:
    """Through `decode`: threads of a build may read their first record at once, which msgspec alone does not bear."""
    return decode(msgspec.json.encode(message), kind)


def _died(module: str, unit: Unit, status: int, stage: str, work: Path, log: Path) -> BuildError:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    smoke = module == SMOKE
    hint = "the log may say more"
    if status == -signal.SIGKILL:
        hint = "the kernel's out-of-memory killer does this: give the machine more memory, or use fewer --jobs"
    elif smoke and (cause := statically_linked_libstdcxx(work / "out")):
        hint = cause
    elif smoke:
        hint = "the library crashes where it is loaded or run; it was not published"
    return BuildError(
        f"the process that {'runs the result once' if smoke else 'compiles'} {how} during: {stage}",
        hint=hint,
        unit=unit.name,
        stage="smoke run" if smoke else stage,
        source="",
        log=str(log),
    )


def _hint(module: str, given: str, work: Path, log: Path, logged: int) -> str:
    """What the smoke run's message may not say: a library's own reason is only in what it has logged."""
    if module != SMOKE:
        return given
    with suppress(OSError):
        said = log.read_bytes()[logged:].decode(errors="replace")
        return statically_linked_libstdcxx(work / "out") or given or hint_for(said[-LOG_TAIL:])
    return given


def statically_linked_libstdcxx(folder: Path) -> str:
    """The cause and the cure if a library links libstdc++ statically: its own copy clashes with torch's and crashes."""
    for library in folder.glob("*.so"):
        if b"libstdc++.so" not in library.read_bytes():
            compiler = os.environ.get("CXX", "g++")
            return (
                f"the C++ compiler ({compiler}) linked libstdc++ statically, and every such library crashes on load "
                "beside torch's own: set CXX to a compiler that links the shared libstdc++.so, like CXX=g++"
            )
    return ""


def _check_compilable(work: Path) -> None:
    """Raises StoreError for a folder that Inductor's compile commands, which are split as by a shell, cannot name."""
    if found := re.search(r"[\s'\"\\,]", str(work)):
        raise StoreError(
            f"nothing can be compiled in the folder for temporary files, {work.parent}: its path has {found[0]!r}",
            hint="set TMPDIR to a folder whose path has no spaces, quotes, backslashes and commas",
            path=str(work.parent),
        )


def _caches(work: Path, kernels: Path | None) -> dict[str, str]:
    """A unit's own caches; Triton's is the build's, where that is shared."""
    cache = work / "cache"
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(kernels or cache / "triton")}


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for one unit, removed with all that is in it; locked, so that `aotc gc` removes those of killed builds.

    Raises StoreError.
    """
    with typed_errors("write in", Path(tempfile.gettempdir())):
        folder, descriptor = held_folder("aotc-build-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
