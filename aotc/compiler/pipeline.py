"""`aotc build`: plan, compile what the store does not hold, publish."""

from __future__ import annotations

import datetime
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import filelock
import msgspec
from torch import nn

from aotc.compiler.executors import Compiled, Executor, Task
from aotc.compiler.job import Autotuned
from aotc.compiler.plan import PlannedUnit, Unit, look_up, plan_units
from aotc.compiler.publish.target_artifacts import merge
from aotc.compiler.workers.progress import STAGE, Doing, OnProgress, Progress, Span, StageCosts, span_here
from aotc.errors import AotcError, BuildError
from aotc.manifest import Manifest
from aotc.picks import PickFile
from aotc.records import Artifact, File, tuned_dims
from aotc.store import Shared, Store, UnitRecord, each_file, publish, put_unit, use_unit
from aotc.store.disk import typed_errors

Status = Literal["built", "cached", "failed"]

T = TypeVar("T")
R = TypeVar("R")

LITTLE_CODE = 16 << 10
"""Bytes of machine code that the GPU's driver may compile in a service unsaid: for any operator of cuDNN it is 4 KB."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one unit. `bucket` names its region too, if it has one; `size` is the compressed bytes of its
    blobs; `log` the path of a failed unit's log; `shared` what it took from other units of this build."""

    model: str
    bucket: str
    target: str
    status: Status
    seconds: float
    size: int = 0
    error: AotcError | None = None
    log: str = ""
    notes: tuple[str, ...] = ()
    shared: Shared = Shared()


class Event(msgspec.Struct, frozen=True):
    """Something happened to a unit: it is `doing` something, it has done it (`span`), or, with `outcome`, it ended."""

    unit: Unit
    doing: Doing | None = None
    span: Span | None = None
    outcome: Outcome | None = None


class BuildReport(msgspec.Struct, frozen=True):
    """All outcomes in the manifest's order, and the digest of each bundle that was published, by model."""

    outcomes: tuple[Outcome, ...]
    bundles: dict[str, str]

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]

    @property
    def shared(self) -> Shared:
        """What all units took from others of this build."""
        names = Shared.__struct_fields__
        return Shared(*(sum(getattr(outcome.shared, name) for outcome in self.outcomes) for name in names))


OnEvent = Callable[[Event], None]


def plan_build(
    manifest: Manifest,
    store_path: Path,
    force: bool,
    picks: PickFile | None = None,
    *,
    targets: Collection[str] = (),
    elsewhere: bool = False,
    modules: Mapping[str, nn.Module] | None = None,
) -> list[PlannedUnit]:
    """What a build would do; nothing is written. Raises ManifestError, BuildError, EnvironmentMismatchError."""
    store = Store.open(store_path) if (store_path / "oci-layout").exists() else None
    units = plan_units(manifest, modules, picks, targets=targets, elsewhere=elsewhere)
    return [look_up(store, unit, force) for unit in units]


def build(
    manifest: Manifest,
    planned: Sequence[PlannedUnit],
    store_path: Path,
    executor: Executor,
    *,
    tag: str | None = "latest",
    locked: bool = False,
    on_event: OnEvent = lambda event: None,
) -> BuildReport:
    """Compile the planned units that the store lacks and publish one bundle for each model, unless there is no `tag`.

    With `locked`, a unit whose picks are not all pinned fails.

    A failed unit does not lose the others. On KeyboardInterrupt every process is ended; units that were finished are
    kept and need not be compiled again, and no tag has moved.

    Raises StoreError where the store cannot be written.
    """
    store = Store.create(store_path)
    with store.writing("aotc build"):
        run = _Run(store, manifest.folder, executor, locked, on_event)
        order = sharing_order([plan.unit for plan in planned])
        ended = side_by_side(run.unit, [planned[index] for index in order], executor)
        results = [result for _, result in sorted(zip(order, ended, strict=True), key=lambda pair: pair[0])]
        if tag is None:
            return BuildReport(tuple(outcome for outcome, _ in results), {})
        return _publish_all(store, planned, tag, results)


def sharing_order(units: Sequence[Unit]) -> list[int]:
    """The units' positions in the order in which they should begin: those last whose questions others have answered.

    Buckets of equally many elements (1 × 256 and 2 × 128 tokens) have most matrix products in common. Side by side they
    would wait for each other's answers; so one of each kind begins, first of the kinds that are most frequent.
    """
    alike: dict[Any, list[int]] = {}
    for index, unit in enumerate(units):
        elements = math.prod(tuned_dims(unit.bucket).values())
        alike.setdefault((unit.spec.name, unit.region, unit.target.name, elements), []).append(index)
    kinds = sorted(alike.values(), key=len, reverse=True)
    return [index for begin in (True, False) for kind in kinds for index in (kind[:1] if begin else kind[1:])]


Result = tuple[Outcome, UnitRecord | None]


def _publish_all(store: Store, planned: Sequence[PlannedUnit], tag: str, results: Sequence[Result]) -> BuildReport:
    """One bundle for each model of which a unit was built; units that do not go together into one have failed."""
    outcomes, bundles = [outcome for outcome, _ in results], {}
    for model in dict.fromkeys(plan.unit.spec.name for plan in planned):
        built = {index: record for index, (outcome, record) in enumerate(results) if record and outcome.model == model}
        if not built:
            continue
        # Of the newest unit, so that an unchanged rebuild gives the same bundle.
        created = max(record.created for record in built.values())
        try:
            artifacts = merge(record.artifact for record in built.values())
        except BuildError as error:
            for index in built:
                outcomes[index] = msgspec.structs.replace(outcomes[index], status="failed", error=error)
            continue
        bundles[model] = publish(store, model, tag, artifacts, created=created)
    return BuildReport(tuple(outcomes), bundles)


def side_by_side(function: Callable[[T], R], units: Sequence[T], executor: Executor) -> list[R]:
    """What `function` gives for each unit, as many at a time as the executor takes; an error or Ctrl-C ends it."""
    with ThreadPoolExecutor(max_workers=executor.slots) as pool:
        futures = [pool.submit(function, plan) for plan in units]
        try:
            wait_for(futures)
        except BaseException:
            executor.end()
            for future in futures:
                future.cancel()
            raise
    return [future.result() for future in futures]


def wait_for(futures: Iterable[Future[R]]) -> None:
    """Wait in slices: a plain wait would not see Ctrl-C before a unit ends."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=0.5)
        for future in done:
            future.result()


LONGEST_NAME = 150
"""Bytes of a unit's name in that of its log, of whose name a file system takes 255, or fewer."""


def log_name(unit: Unit) -> str:
    """The unit's name; where that is too long, its beginning and part of the key."""
    name = re.sub(r"[^A-Za-z0-9._=-]+", "_", unit.name)
    return f"{name}.log" if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{unit.key[7:23]}.log"


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Run:
    """One build's units, compiled or taken from the store."""

    def __init__(self, store: Store, folder: Path, executor: Executor, locked: bool, on_event: OnEvent) -> None:
        self.store, self.folder, self.executor, self.locked, self.on_event = store, folder, executor, locked, on_event

    def unit(self, plan: PlannedUnit) -> Result:
        unit, began = plan.unit, time.monotonic()
        log = self.store.path / ".aotc" / "logs" / log_name(unit)
        record: UnitRecord | None = None
        autotuned: Autotuned | None = None
        try:
            record = use_unit(self.store, unit.key) if plan.cached else None
            if record is None:
                record, autotuned = self._find_or_compile(plan, log)
            status: Status = "built" if autotuned else "cached"
            size = sum({file.blob: file.blob_size for file in each_file(record.artifact)}.values())
            notes = (*_notes(record, log), *_autotuning_notes(unit, autotuned))
            shared = autotuned.shared if autotuned else Shared()
            # What it waited for a node of a cluster is not the unit's.
            seconds = record.seconds if autotuned else time.monotonic() - began
            outcome = _outcome(unit, status, seconds, size=size, notes=notes, shared=shared)
        except AotcError as error:
            outcome = _outcome(unit, "failed", time.monotonic() - began, error=error, log=str(log))
        self.on_event(Event(unit, outcome=outcome))
        return outcome, record

    def _find_or_compile(self, plan: PlannedUnit, log: Path) -> tuple[UnitRecord, Autotuned | None]:
        """Compile the unit, unless another build is doing so: then wait for it and take what it gave."""
        unit = plan.unit
        lock = self.store.path / ".aotc" / "units" / f"{unit.key.removeprefix('sha256:')}.lock"
        log.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with self._alone(unit, lock):
            existing = use_unit(self.store, unit.key)
            if existing is not None and existing != plan.replaced:
                return existing, None
            return self._compile(unit, log)

    @contextmanager
    def _alone(self, unit: Unit, path: Path) -> Iterator[None]:
        """Hold the unit's lock. Waiting for another build must not outlast a Ctrl-C, so it is done in slices."""
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            self.on_event(Event(unit, Doing("wait for another build")))
        while not lock.is_locked:
            self.executor.raise_if_ended()
            with suppress(filelock.Timeout):
                lock.acquire(timeout=0.5)
        try:
            yield
        finally:
            lock.release()

    def _compile(self, unit: Unit, log: Path) -> tuple[UnitRecord, Autotuned]:
        costs = StageCosts(time.time())
        begin_log(log)

        def tell(progress: Progress) -> None:
            event = Event(unit, doing=progress) if isinstance(progress, Doing) else Event(unit, span=progress)
            self.on_event(event)

        def on_progress(progress: Progress) -> None:
            costs.add(progress)
            tell(progress)

        with self.executor.compile(Task(unit, self.folder, log, self.locked), on_progress) as compiled:
            record = compiled.stored or store_unit(self.store, unit, compiled, compiled.costs or costs, tell)
        if not record.failed_candidates:
            log.unlink(missing_ok=True)
        return record, compiled.autotuned


def begin_log(path: Path) -> None:
    """An empty log of our own: what another build left there goes, and a link or pipe is not written through.

    Raises StoreError.
    """
    with typed_errors("write", path):
        path.unlink(missing_ok=True)
        path.touch(exist_ok=False)


def store_unit(store: Store, unit: Unit, compiled: Compiled, costs: StageCosts, tell: OnProgress) -> UnitRecord:
    """Put what was compiled into the store, and remember it under the unit's key. Raises StoreError."""
    artifact, folder, smoked = compiled.artifact, compiled.folder, compiled.smoked
    assert artifact is not None and folder is not None and smoked is not None
    began = time.time()
    tell(Doing("store"))
    artifact = store_files(store, artifact, folder)
    stored = span_here("store", STAGE, began, time.time())
    costs.add(stored)
    tell(stored)
    seconds = round(time.time() - costs.began, 3)
    autotuned = compiled.autotuned
    record = UnitRecord(
        unit.key,
        unit.factors,
        artifact,
        seconds,
        now(),
        autotuned.failed_candidates,
        costs.stages,
        smoked.cost,
        autotuned.shared,
        smoked.driver_compiled,
    )
    put_unit(store, record)
    return record


def _outcome(
    unit: Unit,
    status: Status,
    seconds: float,
    *,
    size: int = 0,
    error: AotcError | None = None,
    log: str = "",
    notes: tuple[str, ...] = (),
    shared: Shared = Shared(),  # noqa: B008 - it is frozen
) -> Outcome:
    return Outcome(unit.spec.name, unit.part, unit.target.name, status, seconds, size, error, log, notes, shared)


def _notes(record: UnitRecord, log: Path) -> tuple[str, ...]:
    """What a person should know of a unit that was built: how it is launched, and what autotuning dropped."""
    notes = []
    launch = record.artifact.variants[0].launch
    if launch is not None:
        how = "as a CUDA graph" if launch.graph else "directly"
        timed = launch.direct_ms is not None and launch.graph_ms is not None
        figures = f"direct {launch.direct_ms:.4f} ms, graph {launch.graph_ms:.4f} ms" if timed else launch.reason
        notes.append(f"launched {how}: {figures}")
    if (cost := record.cost) is not None:
        share = cost.passing_ms / cost.regions_ms if cost.regions_ms else 0.0
        notes.append(
            f"a call of the model takes {cost.regions_ms:.3f} ms with this code, {cost.eager_ms:.3f} ms without; "
            f"passing into it {cost.calls} times slows the call by {cost.passing_ms:.3f} ms ({share:.1%})"
        )
    if record.driver_compiled > LITTLE_CODE:
        notes.append(
            f"the GPU's driver compiles {record.driver_compiled >> 10} KB for libraries' operators, like cuDNN's, at a "
            "process's load or first call: keep its cache, the folder CUDA_CACHE_PATH, from process to process"
        )
    if record.failed_candidates:
        notes.append(f"{record.failed_candidates} autotuning candidates failed and were dropped: {log}")
    return tuple(notes)


def _autotuning_notes(unit: Unit, autotuned: Autotuned | None) -> list[str]:
    """Of a unit that was compiled with pins: what they decided and what they did not."""
    if autotuned is None:
        return []
    notes = [*autotuned.left_out, *([autotuned.unavailable] if autotuned.unavailable else [])]
    if unit.pins.own or unit.pins.seeds:
        whose = "pinned" if unit.pins.own else "taken from other units' pins"
        others = f", {autotuned.shared.picks} measured in other units of this build" if autotuned.shared.picks else ""
        notes.append(f"{autotuned.pinned} picks {whose}, {len(autotuned.tuned)} measured{others}")
        notes += [f"measured, since it is not pinned: {what}" for what in autotuned.tuned]
        notes += [f"stale: {what}" for what in autotuned.stale]
    return notes


def store_files(store: Store, artifact: Artifact, folder: Path) -> Artifact:
    """Put the staged files of a one-variant artifact into the store; the artifact with their blobs named."""

    def put(file: File) -> File:
        return store.blobs.put_file_zstd(folder / file.name, name=file.name)

    (variant,) = artifact.variants
    attributes = artifact.module.attributes_file
    return msgspec.structs.replace(
        artifact,
        module=msgspec.structs.replace(artifact.module, attributes_file=put(attributes) if attributes else None),
        constants=put(artifact.constants) if artifact.constants else None,
        variants=(
            msgspec.structs.replace(
                variant,
                files=tuple(put(file) for file in variant.files),
                report=put(variant.report) if variant.report else None,
                read_values=put(variant.read_values) if variant.read_values else None,
                picks=put(variant.picks) if variant.picks else None,
            ),
        ),
    )
