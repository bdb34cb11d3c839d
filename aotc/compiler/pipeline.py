"""`aotc build`, from top to bottom: `build` is the whole of it.

plan       the units of a manifest, each with its key             `planning.plan`, `planning.key`
look up    their finished records in the store                    `planning.cache_lookup`
compile    each in a process of its own, on the executor's host   `executors`, `workers.unit_process`, `unit`
smoke run  the result once, in a fresh process                    `workers.unit_process`, `smoke`
store      its files as blobs, its record under its key           `publish.unit_files`
publish    one bundle for each model, and its tag                 `publish.bundles`
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import filelock
from msgspec.structs import replace

from aotc.compiler.build_report import (
    BuildReport,
    Event,
    NoWatcher,
    OnEvent,
    Watcher,
    as_event,
    failed,
    finished,
    not_planned,
)
from aotc.compiler.executors.executor import Executor, each_unit
from aotc.compiler.executors.host import check_host
from aotc.compiler.executors.local import LocalExecutor, jobs_for, targets_of_many
from aotc.compiler.messages import WAITING, Autotuned, Doing, Progress, Span, StageCosts, Task, Unit
from aotc.compiler.planning.cache_lookup import PlannedUnit, look_up
from aotc.compiler.planning.estimate import Estimate, estimate
from aotc.compiler.planning.plan import InspectedModels, ModelFacts, inspect_models, plan_units
from aotc.compiler.planning.shards import Shard, split
from aotc.compiler.publish.bundles import Publication, UnitResult, publish_bundles
from aotc.compiler.publish.unit_files import store_unit
from aotc.compiler.publish.url_store import BuildStore, keeping, place_of, publish_remotely, with_remote_units
from aotc.compiler.request import BuildRequest
from aotc.compiler.workers.module_holder import modules_made_once
from aotc.compiler.workers.process_failure import begin_log
from aotc.compiler.workers.unit_servers import ForkServers
from aotc.errors import AotcError
from aotc.machine.locks import SHORTEST
from aotc.machine.this_host import refuse_free_threading
from aotc.models.fake_ranks import group_left
from aotc.store.layout.plans import ShardPlan, put_plan
from aotc.store.layout.store import Store
from aotc.store.layout.units import StoredUnits, UnitRecord, use_unit
from aotc.store.maintenance.gc import remove_work_folders


def build(request: BuildRequest, servers: ForkServers, watcher: Watcher | None = None) -> BuildReport:
    """Compile the units that the store lacks, and publish one bundle for each model; a shard publishes none.

    The other units are built even if one fails; its model's tag stays as it is, unless `request.settings.partial`. On
    KeyboardInterrupt every process is ended, and no tag is moved. Finished units are kept and need not be compiled
    again. The units' processes are forked from `servers`, which may already be importing, and which the caller closes.

    Raises ManifestError, BuildError, EnvironmentMismatchError where nothing can be planned, StoreError where the store
    cannot be written, RemoteError where its URL cannot be reached.
    """
    refuse_free_threading()
    watcher = watcher or NoWatcher()
    place = place_of(request.store)
    with watcher.planning(), group_left():
        inspected = None
        if not request.cluster:
            inspected = modules_made_once(request.manifest, servers, stored_in(place), request.settings.dummy_weights)
        left_out: dict[str, AotcError] = {}
        planned, whole = plan_build(request, place, inspected, left_out)
    del inspected  # the units' processes hold their own modules
    watcher.planned(planned)
    remove_work_folders()
    known, units = estimate(place.opened(), planned), [plan.unit for plan in planned if plan.cached is None]
    with executor_for(request, units, place, known, servers) as executor:
        with watcher.compiling(planned, executor.parallel, known) as on_event:
            store = Store.create(place.folder)
            with store.writing("aotc build"):
                each = UnitBuild(request, store, executor, keeping(place.staging, on_event))
                done = Publication(each_unit(each.result, planned, executor), {}, {})
                before: dict[str, str] = {}
                if request.shard is None:
                    models = dict.fromkeys(outcome.model for outcome, _ in done.results)
                    before = {model: named for model in models if (named := place.named(model, request.tag))}
                    done = publish_bundles(store, request.tag, done.results, request.settings.partial)
        if place.staging is not None:
            publish_remotely(planned, tuple(done.bundles), request.tag, place.staging)
        elif request.shard is not None:  # at a URL, where all shards upload, the next build finds every unit
            put_plan(store, request.tag, whole)
    unplanned = [not_planned(request.manifest.models[name], error) for name, error in left_out.items()]
    outcomes = (*(outcome for outcome, _ in done.results), *unplanned)
    return BuildReport(outcomes, done.bundles, len(whole.units), done.unpublished, before)


class BuildPlan(NamedTuple):
    """The units to build, and the plan of all shards."""

    planned: list[PlannedUnit]
    whole: ShardPlan


def plan_build(
    request: BuildRequest,
    place: BuildStore,
    inspected: InspectedModels | None = None,
    failed: dict[str, AotcError] | None = None,
) -> BuildPlan:
    """Plan a build; nothing is compiled. `inspected` and `failed` are as in `plan_units`.

    Raises ManifestError, BuildError, EnvironmentMismatchError.
    """
    elsewhere = request.cluster is not None
    stored = stored_in(place)
    inspected = inspected or inspect_models(request.manifest, stored, request.settings.dummy_weights)
    units = plan_units(
        request.manifest,
        inspected,
        request.picks,
        targets=request.targets,
        elsewhere=elsewhere,
        settings=request.settings,
        failed=failed,
    )
    if request.settings.dummy_weights:  # their memory is a block's, but on a GPU that runs the model
        on_cpu = [unit.target.device == "cpu" or unit.gpu is not None for unit in units]
        units = [replace(unit, state_bytes=0) if cpu else unit for unit, cpu in zip(units, on_cpu, strict=True)]
    lines = {
        spec.name: partial(request.manifest.where, "models", spec.name) for spec in request.manifest.models.values()
    }
    changed = {name: facts.changed for name, facts in inspected.facts.items() if isinstance(facts, ModelFacts)}
    force = request.settings.force
    found = [look_up(stored, unit, force, changed[unit.spec.name], lines[unit.spec.name]) for unit in units]
    planned, whole = split(found, request.shard or Shard(1, 1))
    if place.staging is not None and not force:
        planned = with_remote_units(planned, place.staging, request.manifest.folder)
    return BuildPlan(planned, whole)


def stored_in(place: BuildStore) -> StoredUnits | None:
    """The finished units of the store; None where there is none yet. Raises StoreError."""
    store = place.opened()
    return StoredUnits(store) if store is not None else None


@contextmanager
def executor_for(
    request: BuildRequest, units: Sequence[Unit], place: BuildStore, known: Estimate, servers: ForkServers | None = None
) -> Iterator[Executor]:
    """The executor for these units. Without units, no cluster is connected.

    Raises BuildError and StoreError where no unit could be compiled on this machine.
    """
    executor = _cluster(request, units, place, known) if request.cluster and units else None
    if executor is None and units:
        check_host(place.folder, known)
    executor = executor or LocalExecutor(
        jobs_for(units, request.settings.jobs, known.memory),
        share=request.settings.share,
        precompiled=targets_of_many(units),
        servers=servers,
    )
    try:
        yield executor
    finally:
        executor.close()


def _cluster(request: BuildRequest, units: Sequence[Unit], place: BuildStore, known: Estimate) -> Executor:
    from aotc.compiler.executors.ray.ray_executor import RayExecutor

    assert request.cluster is not None
    return RayExecutor(
        units,
        request.manifest.folder,
        request.cluster,
        share=request.settings.share,
        staging=place.staging,
        exclude=place.folder,
        used=known.memory,
    )


@dataclass(frozen=True)
class UnitBuild:
    """Builds the units of a request, each in a thread."""

    request: BuildRequest
    store: Store
    executor: Executor
    on_event: OnEvent
    began: float = field(default_factory=time.time)

    def result(self, plan: PlannedUnit) -> UnitResult:
        """The unit's outcome, and its record in the store, None if the unit failed."""
        unit, began = plan.unit, time.monotonic()
        log = self.store.path / ".aotc" / "logs" / unit.log_name
        record: UnitRecord | None = None
        autotuned: Autotuned | None = None
        try:
            record = use_unit(self.store, unit.key) if plan.cached else None
            if record is None:
                record, autotuned = self._find_or_compile(plan, log)
            outcome = finished(unit, record, autotuned, time.monotonic() - began, log)
        except AotcError as error:
            outcome = failed(unit, error, time.monotonic() - began, log)
        self.on_event(Event(unit, outcome=outcome))
        return outcome, record

    def _find_or_compile(self, plan: PlannedUnit, log: Path) -> tuple[UnitRecord, Autotuned | None]:
        """Compile the unit, or, if another build is compiling it, wait and take that build's record."""
        self._waited(plan.unit, "for a turn: --jobs", self.began)
        with self._alone(plan.unit):
            existing = use_unit(self.store, plan.unit.key)
            if existing is not None and existing != plan.replaced:
                return existing, None
            return self._compile(plan, log)

    @contextmanager
    def _alone(self, unit: Unit) -> Iterator[None]:
        """Hold the unit's lock. Waits for another build in slices, so that Ctrl-C ends the wait."""
        path = self.store.path / ".aotc" / "units" / f"{unit.key.removeprefix('sha256:')}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            self.on_event(Event(unit, Doing("wait for another build")))
        began = time.time()
        while not lock.is_locked:
            self.executor.raise_if_ended()
            with suppress(filelock.Timeout):
                lock.acquire(timeout=0.5)
        self._waited(unit, "for another build, which compiles the same", began)
        try:
            yield
        finally:
            lock.release()

    def _waited(self, unit: Unit, what: str, began: float) -> None:
        """Tell of a wait that has ended now."""
        seconds = time.time() - began
        if seconds >= SHORTEST:
            self.on_event(Event(unit, span=Span(f"wait {what}", WAITING, began, seconds, socket.gethostname())))

    def _compile(self, plan: PlannedUnit, log: Path) -> tuple[UnitRecord, Autotuned]:
        """Compile the unit and run the result once, in processes of the executor; then store it."""
        unit = plan.unit
        costs = StageCosts(time.time())
        begin_log(log)

        def tell(progress: Progress) -> None:
            self.on_event(as_event(unit, progress))

        def on_progress(progress: Progress) -> None:
            costs.add(progress)
            tell(progress)

        request = self.request
        task = Task(unit, request.manifest.folder, log, request.settings, plan.graphs, str(self.store.path))
        with self.executor.compile(task, on_progress) as compiled:
            record = compiled.stored or store_unit(self.store, unit, compiled, compiled.costs or costs, tell)
        if not record.failed_candidates:
            log.unlink(missing_ok=True)
        return record, compiled.autotuned
