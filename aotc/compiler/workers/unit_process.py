"""One unit in processes of its own: a worker that compiles it, then a fresh one that runs the result once, and, where
that is wrong, a third that says where."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from aotc.compiler.messages import (
    STAGE,
    Autotuned,
    Doing,
    FinishedUnit,
    Job,
    Message,
    OnProgress,
    Progress,
    Reply,
    Span,
    Task,
    UnitCompiled,
    UnitFailed,
    UnitRan,
    WrongPart,
)
from aotc.compiler.publish.unit_record import RECORD, folder_of_kind
from aotc.compiler.workers.process_failure import died, failed, with_part
from aotc.compiler.workers.process_group import Processes
from aotc.compiler.workers.shared_folder import SharedFolder
from aotc.compiler.workers.unit_servers import SMOKE, WORKER, Forked, unit_environment
from aotc.errors import BuildError, StoreError
from aotc.machine.processes import whole_lines
from aotc.machine.resources import MemoryWatch
from aotc.models.launch import unmeasured_launch
from aotc.picks import pinned_launch
from aotc.provenance import BuiltArtifact, Smoked
from aotc.records import LaunchPick, decode
from aotc.store.files.disk import typed_errors
from aotc.store.files.store_locks import held_folder

R = TypeVar("R", bound=Reply)

_log = logging.getLogger("aotc")


def compile_and_run(
    task: Task,
    work: Path,
    processes: Processes,
    on_progress: OnProgress,
    *,
    shared: SharedFolder | None = None,
    precompile: bool = False,
) -> FinishedUnit:
    """Compile the unit into `work/out`, and run the result once in a fresh process, unless its GPU or CPU is not here.
    Of a parallel model, do so for each kind of ranks.

    In the folder `shared` the units of a build share picks, and, with `precompile`, headers. Raises
    BuildError, StoreError.
    """
    check_compilable(work.parent)
    with shared.kernels() if shared else nullcontext() as kernels:
        environment = unit_environment() | _caches(work, kernels)
        stages = _Stages(processes.memory, on_progress)

        def compiled(ranks: tuple[int, ...]) -> _Kind:
            job = _write_job(task, work, shared, precompile, ranks)
            process = _UnitProcesses(task, job, environment, processes, stages)
            autotuned = process.run(WORKER, "import", UnitCompiled).autotuned
            artifact = decode((_output(work, ranks) / RECORD).read_bytes(), BuiltArtifact)
            if task.unit.absent or (task.unit.gpu is not None and task.unit.spec.train):  # halves are not captured
                smoked = Smoked()
            elif task.unit.gpu is not None:
                smoked = Smoked(unmeasured_launch(task.unit.spec, artifact, pinned_launch(task.unit.pins.own)))
            else:
                smoked = process.smoked()
            return _Kind(autotuned, artifact, smoked)

        kinds = [compiled(())]
        while left := _ranks_without_code([kind.artifact for kind in kinds]):
            kinds.append(compiled(left))
    smoked = _launched_alike([kind.smoked for kind in kinds])
    one, *others = (_with_launch(kind.artifact, smoked) for kind in kinds)
    return FinishedUnit(
        _of_all_kinds(kinds),
        msgspec.structs.replace(one, kinds=tuple(others)),
        work / OUTPUT,
        smoked,
    )


class _Kind(NamedTuple):
    """What compiling the code of one kind of ranks gives."""

    autotuned: Autotuned
    artifact: BuiltArtifact
    smoked: Smoked


def _ranks_without_code(kinds: Sequence[BuiltArtifact]) -> tuple[int, ...]:
    parallel = kinds[0].parallel
    if parallel is None or not parallel.ranks:
        return ()
    served = {rank for kind in kinds if kind.parallel for rank in kind.parallel.ranks}
    return tuple(rank for rank in range(parallel.size) if rank not in served)


def _launched_alike(kinds: Sequence[Smoked]) -> Smoked:
    """The first kind's, launched as all ranks are: a graph with a collective needs one on every rank."""
    launches = [(kind.launch.graph, kind.launch.sizes) for kind in kinds if kind.launch]
    if all(launch == launches[0] for launch in launches):
        return kinds[0]
    return msgspec.structs.replace(kinds[0], launch=LaunchPick(graph=False, reason="not faster on every rank"))


def _of_all_kinds(kinds: Sequence[_Kind]) -> Autotuned:
    """The autotuning of all kinds' code, with the notes of their smoke runs; what was shared with other units is the
    first one's."""
    tuned = [kind.autotuned for kind in kinds]
    notes = [what for kind in kinds for what in (*kind.autotuned.notes, *kind.smoked.notes)]
    return msgspec.structs.replace(
        tuned[0],
        failed_candidates=sum(each.failed_candidates for each in tuned),
        pinned=sum(each.pinned for each in tuned),
        tuned=tuple(what for each in tuned for what in each.tuned),
        measurements=sum(each.measurements for each in tuned),
        stale=tuple(dict.fromkeys(what for each in tuned for what in each.stale)),
        notes=tuple(dict.fromkeys(notes)),
    )


OUTPUT = "out"


def _output(work: Path, ranks: tuple[int, ...]) -> Path:
    return folder_of_kind(work / OUTPUT, ranks[0]) if ranks else work / OUTPUT


def _write_job(task: Task, work: Path, shared: SharedFolder | None, precompile: bool, ranks: tuple[int, ...]) -> Path:
    output, path = _output(work, ranks), work / "job.json"
    output.mkdir(parents=True)
    job = Job(
        task.unit,
        str(task.folder),
        str(output),
        task.settings,
        shared=str(shared.path) if shared else "",
        precompile=precompile,
        ranks=ranks,
        graphs=dict(task.graphs),
        store=task.store,
    )
    path.write_bytes(msgspec.json.encode(job))
    return path


def _with_launch(artifact: BuiltArtifact, smoked: Smoked) -> BuiltArtifact:
    """The record with the launch mode that the smoke run picked."""
    if smoked.launch is None:
        return artifact
    variant = msgspec.structs.replace(artifact.variants[0], launch=smoked.launch)
    return msgspec.structs.replace(artifact, variants=(variant,))


@dataclass(frozen=True)
class _UnitProcesses:
    """Runs the processes of one unit, one after the other."""

    task: Task
    job: Path
    environment: Mapping[str, str]
    processes: Processes
    stages: _Stages

    def run(self, module: str, stage: str, expected: type[R]) -> R:
        """Run a process, which begins with `stage`. Returns its reply. Raises BuildError if it fails or dies."""
        unit, log, work = self.task.unit, self.task.log, self.job.parent
        self.stages.begin(stage)
        logged = log.stat().st_size if log.exists() else 0
        with ExitStack() as running:
            process = self._start(running, module, stage)
            self.stages.watch(process.pid)
            status, reply = _follow(process, self.stages.follow)
            last = self.stages.end()
            self.processes.raise_if_ended()
        if isinstance(reply, UnitFailed):
            raise failed(module, unit, reply, work, log, logged)
        if status != 0 or not isinstance(reply, expected):
            raise died(module, unit, status, last, work, log)
        return reply

    def smoked(self) -> Smoked:
        """Run the result once. Raises BuildError, which names the part of the model that was miscompiled, also where it
        ended the process."""
        try:
            return self.run(SMOKE, "smoke run", UnitRan).smoked
        except BuildError as error:
            # A GPU's code ends no process, and a fork cannot use a GPU.
            crashed = error.fields.get("crashed", False) and self.task.unit.target.device == "cpu"
            if not error.fields.get("miscompiled") and not crashed:
                raise
            extremes = error.fields.get("extremes")
            job = msgspec.structs.replace(
                decode(self.job.read_bytes(), Job), miscompiled=True, extremes=extremes, crashed=crashed
            )
            path = self.job.with_name("miscompiled.json")
            path.write_bytes(msgspec.json.encode(job))
            try:
                part = replace(self, job=path).run(WORKER, "import", WrongPart)
            except BuildError as other:  # the model's failure is the first one
                _log.warning("no part of the model can be looked for: %s", other)
                raise error from None
            raise with_part(error, part) from None

    def _start(self, running: ExitStack, module: str, stage: str) -> Forked:
        unit, log = self.task.unit, self.task.log
        try:
            return running.enter_context(
                self.processes.start(
                    module, str(self.job), self.environment, log, unit.spec.name, absent_gpu=unit.gpu is not None
                )
            )
        except OSError as error:
            raise BuildError(
                f"no process can be started: {error}",
                hint="memory or the limit of processes may be exhausted: try fewer --jobs",
                unit=unit.name,
                stage=stage,
                log=str(log),
            ) from error


def _follow(process: Forked, on_progress: OnProgress) -> tuple[int, Reply | None]:
    """Follow a process's messages to its end. Returns its exit status and its reply, if there was one."""
    reply: Reply | None = None
    for line in whole_lines(process.stdout):
        said = decode(line.encode(), Message).payload
        if isinstance(said, Progress):
            on_progress(said)
        else:
            reply = said
    return process.wait(), reply


class _Stages:
    """Follows the stages of a unit, each of which lasts until the next one begins."""

    def __init__(self, memory: MemoryWatch, on_progress: OnProgress) -> None:
        self._memory, self._on_progress = memory, on_progress
        self._processes: list[int] = []
        self._name, self._began = "", time.time()

    def watch(self, process: int) -> None:
        """Count the memory of this process and its family from now on."""
        self._processes.append(process)

    def follow(self, progress: Progress) -> None:
        """Handle a progress message of a process."""
        if isinstance(progress, Doing) and not progress.detail:
            self.begin(progress.stage)
        else:
            self._on_progress(progress)

    def begin(self, name: str) -> None:
        if name != self._name:
            self.end()
            self._name, self._began = name, time.time()
            self._on_progress(Doing(name))

    def end(self) -> str:
        """End the current stage. Returns its name."""
        name, self._name = self._name, ""
        if name:
            seconds, taken = time.time() - self._began, self._memory.take(self._processes[-1])
            host, process = socket.gethostname(), self._processes[0]
            self._on_progress(Span(name, STAGE, self._began, seconds, host, process, process, *taken))
        return name


def check_compilable(folder: Path) -> None:
    """Raises StoreError for a folder of temporary files whose path Inductor's compile commands, which are split as by a
    shell, cannot contain."""
    if found := re.search(r"[\s'\"\\,]", str(folder)):
        raise StoreError(
            f"nothing can be compiled in the folder for temporary files, {folder}: its path has {found[0]!r}",
            hint="set TMPDIR to a folder whose path has no spaces, quotes, backslashes or commas",
            path=str(folder),
        )


def _caches(work: Path, kernels: Path | None) -> dict[str, str]:
    """The variables of a unit's own caches; Triton's may be shared by the build."""
    cache = work / "cache"
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(kernels or cache / "triton")}


@contextmanager
def work_folder() -> Iterator[Path]:
    """A temporary folder for one unit, removed at the end. It is locked: `aotc gc` removes those without a lock.

    Raises StoreError.
    """
    with typed_errors("write in", Path(tempfile.gettempdir())):
        folder, descriptor = held_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
