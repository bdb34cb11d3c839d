"""`aotc build --check`: compile the store's units again, with their recorded picks, and compare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from aotc.compiler.build_report import OnEvent, Watcher, as_event
from aotc.compiler.executors.executor import Executor, side_by_side
from aotc.compiler.messages import NO_PINS, Pins, Task
from aotc.compiler.pipeline import executor_for, plan_build
from aotc.compiler.planning.cache_lookup import PlannedUnit
from aotc.compiler.planning.estimate import estimate
from aotc.compiler.planning.key import OTHER_UNITS
from aotc.compiler.publish.url_store import place_of
from aotc.compiler.request import BuildRequest
from aotc.errors import AotcError, Issue
from aotc.provenance import BuiltArtifact
from aotc.records import File
from aotc.store.layout.built import read_picks
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord


class RebuiltUnit(msgspec.Struct, frozen=True):
    """One unit compiled again: each difference from the store's record, or the error why it could not be compiled."""

    model: str
    bucket: str
    target: str
    differences: tuple[Issue, ...] = ()
    error: AotcError | None = None

    @property
    def same(self) -> bool:
        return not self.differences and self.error is None


def check(request: BuildRequest, watcher: Watcher) -> list[RebuiltUnit]:
    """Compile each unit again, with its recorded picks, and compare files and record by digest.

    Nothing is written to the store except the logs of units that fail.
    """
    place = place_of(request.store)
    with watcher.planning():
        planned, _ = plan_build(_with(request, force=False), place)
    watcher.planned(planned)
    store, known, units = Store.open(place.folder), estimate(place.opened(), planned), [plan.unit for plan in planned]
    with (
        executor_for(_with(request, share=False), units, place, known) as executor,
        watcher.compiling(planned, executor.parallel, known) as on_event,
    ):
        return side_by_side(lambda plan: _check_unit(plan, request, store, executor, on_event), planned, executor)


def _with(request: BuildRequest, **changes: bool) -> BuildRequest:
    return replace(request, settings=msgspec.structs.replace(request.settings, **changes))


def _check_unit(
    plan: PlannedUnit, request: BuildRequest, store: Store, executor: Executor, on_event: OnEvent
) -> RebuiltUnit:
    unit = plan.unit
    named = (unit.spec.name, unit.part, unit.target.name)
    if plan.cached is None:
        hint = "build it first, or check it with the --picks that it was built with"
        return RebuiltUnit(*named, differences=(Issue("the store does not hold this unit", hint=hint),))
    log = store.path / ".aotc" / "logs" / f"check-{unit.key[7:23]}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    pinned = msgspec.structs.replace(unit, pins=recorded_pins(store, plan.cached))
    settings = msgspec.structs.replace(request.settings, locked=False)
    task = Task(pinned, request.manifest.folder, log, settings)
    try:
        with executor.compile(task, lambda progress: on_event(as_event(unit, progress))) as compiled:
            again = compiled.artifact
    except AotcError as error:
        return RebuiltUnit(*named, error=error)
    log.unlink(missing_ok=True)
    assert again is not None
    return RebuiltUnit(*named, differences=tuple(differences(plan.cached.artifact, again)))


def recorded_pins(store: Store, record: UnitRecord) -> Pins:
    """All picks that the unit's build recorded, as pins."""
    (variant,) = record.artifact.variants
    picks = read_picks(store, variant)
    return Pins(picks) if picks else NO_PINS


def differences(stored: BuiltArtifact, again: BuiltArtifact) -> Iterable[Issue]:
    """Each file and each field in which two one-variant artifacts differ.

    The blobs' encoding, the other buckets and targets of the manifest, and comments in the model's code are ignored: a
    unit's key leaves them out, too.
    """
    for one, other in zip(stored.kinds, again.kinds, strict=False):
        for issue in differences(one, other):
            where = f"rank {', '.join(map(str, one.parallel.ranks))}" if one.parallel else ""
            yield msgspec.structs.replace(issue, where=where)
    old, new = _files(stored), _files(again)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield Issue(f"file {name}", expected=old.get(name, "absent"), actual=new.get(name, "absent"))
    before, after = _without_files(stored), _without_files(again)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield Issue(name, expected=str(before.get(name))[:200], actual=str(after.get(name))[:200])


def _files(artifact: BuiltArtifact) -> dict[str, str]:
    (variant,) = artifact.variants
    optional = (
        variant.report,
        variant.picks,
        variant.read_values,
        artifact.module.attributes_file,
        artifact.constants,
    )
    extra = [file for file in optional if file]
    return {file.name: file.digest for file in (*variant.files, *extra)}


def _without_files(artifact: BuiltArtifact) -> dict[str, object]:
    (variant,) = artifact.variants
    bare: tuple[File, ...] = ()
    variant = msgspec.structs.replace(variant, files=bare, report=None, picks=None, read_values=None)
    module = msgspec.structs.replace(artifact.module, attributes_file=None, trees={})
    bare_artifact = msgspec.structs.replace(artifact, variants=(variant,), module=module, constants=None, kinds=())
    fields = msgspec.to_builtins(bare_artifact)
    fields["manifest"] = {name: value for name, value in fields["manifest"].items() if name not in OTHER_UNITS}
    return {**fields, **{f"variant {name}": value for name, value in fields.pop("variants")[0].items()}}
