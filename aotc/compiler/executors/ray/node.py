"""Compile a unit on a node of a cluster, inside the cluster's task. Nothing here imports Ray."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from aotc.compiler.autotune.shared_picks import add_answers, answers_in
from aotc.compiler.executors.executor import side_by_side
from aotc.compiler.executors.local import COMPILE_THREADS, LocalExecutor
from aotc.compiler.messages import (
    FinishedUnit,
    NodeAnswer,
    NodeProgress,
    NodeRequest,
    OnProgress,
    Progress,
    StageCosts,
    Task,
    Unit,
)
from aotc.compiler.planning.key import explain, machine_factors
from aotc.compiler.planning.plan import check_buildable
from aotc.compiler.publish.unit_files import store_unit
from aotc.compiler.workers.unit_servers import ForkServers
from aotc.errors import AotcError, BuildError, Issue
from aotc.machine.environment import cpu_features
from aotc.store.remote.staging import Staging

LOG_LIMIT = 1 << 20
"""Bytes of the end of a unit's log that are sent back."""


class SharedMeasurements(Protocol):
    """Measurements of the build's units on all nodes: files of `aotc.compiler.autotune.shared_picks`, by name."""

    def get(self) -> Mapping[str, bytes]: ...

    def add(self, answers: Mapping[str, bytes]) -> None: ...


def run_on_node(
    request: NodeRequest,
    put: Callable[[NodeProgress], Any],
    measured: SharedMeasurements | None,
    servers: ForkServers,
) -> NodeAnswer:
    """Compile the unit; `put` reports progress. A failure is returned as an answer, and not tried again.

    With `measured`, the unit takes the measurements known at its begin, and adds its own at its end.

    A KeyboardInterrupt, with which a cluster cancels a task, ends the unit's processes and their `servers` within a
    second.
    """

    def on_progress(progress: Progress) -> None:
        with suppress(Exception):  # the progress queue may be gone; the unit is still wanted
            put(NodeProgress(request.unit.key, progress))

    with tempfile.TemporaryDirectory(prefix="aotc-node-") as folder:
        log = Path(folder) / "log"
        log.write_bytes(b"")
        executor = LocalExecutor(1, request.variables, share=measured is not None, servers=servers)
        try:
            (answer,) = side_by_side(
                lambda one: _compile(one, log, executor, on_progress, measured), [request], executor
            )
        finally:
            if executor.shared:
                executor.shared.remove()
    return answer


@contextmanager
def _sharing(executor: LocalExecutor, measured: SharedMeasurements | None) -> Iterator[None]:
    """While active, the executor's unit shares picks with all nodes. Errors of the exchange do not fail the unit.

    Do not call in a task's main thread: Ray gives the cores of a task that waits there to another one.
    """
    shared = executor.shared
    if measured is None or shared is None:
        yield
        return
    known: Mapping[str, bytes] = {}
    with suppress(Exception):
        known = measured.get()
        add_answers(shared.picks, known)
    try:
        yield
        with suppress(Exception):
            found = answers_in(shared.picks)
            measured.add({name: found[name] for name in found.keys() - known.keys()})
    finally:
        shared.remove()


def _compile(
    request: NodeRequest,
    log: Path,
    executor: LocalExecutor,
    on_progress: OnProgress,
    measured: SharedMeasurements | None,
) -> NodeAnswer:
    costs = StageCosts(time.time())

    def follow(progress: Progress) -> None:
        costs.add(progress)
        on_progress(progress)

    unit = request.unit
    try:
        check_node(unit)
        task = Task(unit, Path.cwd() / request.folder, log, request.settings)
        with _sharing(executor, measured), executor.compile(task, follow) as compiled:
            return _answer(request, compiled, log, costs, on_progress)
    except AotcError as error:
        return NodeAnswer(_tail(log), error)


def _answer(request: NodeRequest, compiled: FinishedUnit, log: Path, costs: StageCosts, tell: OnProgress) -> NodeAnswer:
    if request.store is not None:
        staging = Staging(request.store)
        record = store_unit(staging.store, request.unit, compiled, costs, tell)
        staging.keep(request.unit.key)
        return NodeAnswer(_tail(log), compiled=FinishedUnit(compiled.autotuned, stored=record))
    assert compiled.folder is not None
    paths = (path for path in sorted(compiled.folder.rglob("*")) if path.is_file())
    files = {path.relative_to(compiled.folder).as_posix(): path.read_bytes() for path in paths}
    sent = replace(compiled, folder=None, costs=costs)
    return NodeAnswer(_tail(log), compiled=sent, files=files, ended=time.time())


def _tail(log: Path) -> bytes:
    return log.read_bytes()[-LOG_LIMIT:]


def check_node(unit: Unit) -> None:
    """Raises BuildError, with both values of each difference, unless this node has the machine factors of the unit's
    key and can run its code."""
    here = machine_factors()
    planned = {name: unit.factors[name] for name in here}
    if issues := explain(planned, here):
        raise BuildError(
            f"this node ({os.uname().nodename}) differs from the machine that planned the build: planned → here",
            hint="run `aotc build` and the nodes with one image, or choose nodes with --ask",
            issues=tuple(issues),
        )
    target = unit.target
    check_buildable(unit.spec, target, measuring=True)
    if lacking := sorted(set(target.cpu_features) - set(cpu_features())):
        raise BuildError(
            f"{target.name} code cannot run on this node ({os.uname().nodename}): it lacks {', '.join(lacking)}",
            hint=f"start suitable nodes with --resources='{{\"{target.name}\": 4}}', or choose them with --ask",
            issues=(Issue("CPU features", expected=" ".join(target.cpu_features), actual=" ".join(cpu_features())),),
        )


def node_variables(cores: float) -> dict[str, str | None]:
    """Environment variables of a unit's processes on a node: the thread counts of this process, the build's.

    A cluster sets OMP_NUM_THREADS to a task's share of the cores; benchmarks would then time one thread.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    compiling = os.environ.get(COMPILE_THREADS) or str(max(1, int(cores)))
    return {"OMP_NUM_THREADS": threads, COMPILE_THREADS: compiling}
