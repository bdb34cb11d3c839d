"""The process that builds what was remembered of a module: the only module of this room that imports the compiler.

    python -m aotc.tools.remembering.building.build_process JOB.json

It outlives the process that started it, runs at a low priority, and holds the lock of the module that it builds for.
Killed, it leaves the units that it finished, and the next build takes them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aotc.amounts import listed, size_text
from aotc.errors import AotcError, BuildError, RemoteError, StoreError
from aotc.machine.resources import memory_here
from aotc.manifest.types import ModelSpec
from aotc.records import Dims
from aotc.store.files.writing import write_atomically
from aotc.tools.remembering.building.while_waiting import BuildProgress, progress_file, usual_cost, write_at_once
from aotc.tools.remembering.memory.memory import Kind, Memory, Place

if TYPE_CHECKING:
    from aotc.compiler.build_report import Event, OnEvent
    from aotc.compiler.planning.cache_lookup import PlannedUnit
    from aotc.compiler.planning.estimate import Estimate

_log = logging.getLogger("aotc")

NICENESS = 10
CHECK_SECONDS = 120.0
MEMORY_SECONDS = 120.0
"""How long a build waits for free memory."""
MOST_ROUNDS = 4
"""How often it begins again since another machine has built for the same module, in the same store at a URL."""
MOST_ATTEMPTS = 3
"""Builds in a row that may end without a result: what ends them, as too little memory, may be the build itself."""


class BuildJob(msgspec.Struct, frozen=True):
    """What to build: the forms of the memory called `name` in `folder`, into `store`. `made`: how the module is made,
    as the program says that asks for the build; what the store says of that is not read. `cores` 0: all that this
    process may use. `lock`: a descriptor of the lock, which is held. `url`: of which store `store` is a copy."""

    folder: str
    name: str
    store: str
    made: Memory
    seconds: float
    cores: int
    lock: int
    url: str = ""
    niceness: int = NICENESS
    """Is added to this process's own."""
    repairs: bool = False
    """Whether what is damaged in the store is removed first, as by `aotc fsck --repair`."""


def main() -> None:
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=BuildJob)
    Path(sys.argv[1]).unlink()
    os.nice(job.niceness)
    if job.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-job.cores :])
    os.set_inheritable(job.lock, False)  # the processes of this build do not hold it
    place = Place(Path(job.folder), job.name)
    try:
        if job.repairs:
            from aotc.store.maintenance.fsck import fsck

            for repair in fsck(job.store, repair=True).repairs:
                _log.warning("aotc.compile: %s: %s", repair.path, repair.action)
        if job.url:
            _build_and_share(job, place)
        else:
            _build_missing(job, place)
    except (BuildError, StoreError) as error:  # not the model's fault: no tombstone
        sys.exit(str(error))


def _build_and_share(job: BuildJob, place: Place) -> None:
    """Build what no machine has built, and let the others know. Raises as `_build_missing`, and RemoteError."""
    from aotc.tools.remembering.memory.remote_memory import RemoteMemory

    remote = RemoteMemory(job.url, place)
    for _ in range(MOST_ROUNDS):
        try:
            remote.pull()
        except StoreError as error:  # this machine needs its code all the same
            _log.warning("aotc.compile: %s", f"{error.message}; hint: {error.hint}" if error.hint else error.message)
        _build_missing(job, place)
        if remote.push():
            return
    raise RemoteError(
        f"{job.url} has had another machine's code for {job.name} each of {MOST_ROUNDS} times",
        hint="the next run tries again",
        url=job.url,
        transient=True,
    )


def _build_missing(job: BuildJob, place: Place) -> None:
    """Build what has no code on this machine. Raises BuildError where memory is short."""
    memory = place.read()
    if memory is not None and (kinds := place.unbuilt(memory)):
        memory = msgspec.structs.replace(job.made, kinds=memory.kinds, attempts=memory.attempts)
        ProgressWriter(place, memory.facts["target"]).say("waits for memory, and imports the compiler")
        wait_for_memory(memory.facts["target"].partition(":")[0], memory.state_bytes)
        _build(job, place, memory, kinds)


def wait_for_memory(device: str, state_bytes: int, seconds: float = MEMORY_SECONDS) -> None:
    """Wait until this machine has the memory free that one unit takes. Raises BuildError."""
    from aotc.compiler.executors.local import BASE, WEIGHTS

    needed, ends = BASE[device] + WEIGHTS * state_bytes, time.monotonic() + seconds
    while (free := memory_here()) < needed:
        if time.monotonic() >= ends:
            raise BuildError(
                f"a build takes about {size_text(needed)} of memory, and {size_text(free)} are free",
                hint="it is tried again by the next run that has a call without code; or build on another machine, by "
                "the manifest that `aotc init --from-store` writes",
                expected=needed,
                actual=free,
            )
        time.sleep(min(1.0, seconds))


def _build(job: BuildJob, place: Place, memory: Memory, kinds: list[int]) -> None:
    if memory.attempts >= MOST_ATTEMPTS:
        for kind in kinds:
            place.fail(kind, f"{memory.attempts} builds in a row ended without a result; was memory short?")
        place.change(None, lambda memory: setattr(memory, "attempts", 0))
        return

    def begun(memory: Memory) -> None:
        memory.attempts += 1

    place.change(None, begun)
    attempt = Attempt(job, place, memory, {place.model(n): memory.kinds[n] for n in kinds})
    with suppress(KeyboardInterrupt), _ended_after(job.seconds):
        attempt.run()
    failed = attempt.failed
    for n in kinds:
        if reason := failed.get(place.model(n)):
            place.fail(n, reason)

    def ended(now: Memory) -> None:
        now.builds, now.attempts = now.builds + 1, 0
        for n in kinds:
            if place.model(n) not in failed:
                kind = now.kinds[n]
                kind.built, kind.regions, kind.pushed = len(memory.kinds[n].calls), memory.kinds[n].regions, ""
                kind.counters = memory.kinds[n].counters

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


class ProgressWriter:
    """Of the process that builds: says its stages in its log, which is its standard output, and in the file. It is the
    `Watcher` of `aotc.compiler.build_report`."""

    def __init__(self, place: Place, target: str) -> None:
        self.place, self._target = place, target
        self.progress = BuildProgress(os.getpid(), time.time())

    def say(self, doing: str) -> None:
        """Say what is done now."""
        self.progress.doing = doing
        write_at_once(sys.stdout, f"{time.strftime('%H:%M:%S')} {self.progress.line(time.time())}\n")
        with suppress(OSError):
            write_atomically(progress_file(self.place), msgspec.json.encode(self.progress))

    def planning(self) -> AbstractContextManager[None]:
        self.say("captures the models")
        return nullcontext()

    def planned(self, planned: Sequence[PlannedUnit]) -> None:
        self.progress.units = sum(plan.cached is None for plan in planned)
        self.progress.finished = 0

    @contextmanager
    def compiling(self, planned: Sequence[PlannedUnit], parallel: int, known: Estimate) -> Iterator[OnEvent]:
        from aotc.compiler.planning.estimate import remaining

        expected = dict(known.seconds)
        names = [plan.unit.name for plan in planned if plan.cached is None]
        if usual := usual_cost(self.place.store, self.place.name, self._target):
            expected = dict.fromkeys(names, usual.seconds) | expected
        self.progress.began = time.time()
        self.progress.expected = remaining(expected, names, {}, [], parallel) or 0.0
        if names:
            most = max([*known.memory.values(), usual.memory if usual else 0])
            self.say(f"compiles, {parallel} at a time{f', up to {size_text(most)} of memory for each' if most else ''}")
        yield self._on_event

    def _on_event(self, event: Event) -> None:
        if event.outcome is not None:
            if event.outcome.status != "cached":
                self.progress.finished += 1
                self.say(f"{event.unit.name}: {event.outcome.status} in {event.outcome.seconds:.1f} s")
        elif event.doing is not None and not event.doing.detail:
            self.say(f"{event.unit.name}: {event.doing}")


class Attempt:
    """The build of these models. `failed` has the reasons of those without code, also where it was interrupted."""

    def __init__(self, job: BuildJob, place: Place, memory: Memory, models: dict[str, Kind]) -> None:
        self.job, self.place, self.memory, self.models = job, place, memory, models
        self.progress = ProgressWriter(place, memory.facts["target"])
        self._differs: str | None = None
        """How what the factory makes differs from the program's module; None before that was asked."""
        self.failed = dict.fromkeys(models, f"the build took more than {job.seconds:g} s")

    def run(self) -> None:
        from aotc.compiler.workers.unit_servers import ForkServers

        with contextlib.closing(ForkServers()) as self.servers:
            self.servers.begin()  # they import torch and its compiler while this process does
            asked = self.memory.asked.get("regions")
            if asked == "auto":
                self._each([model for model, kind in self.models.items() if not kind.regions], self._find_regions)
            if models := [model for model, kind in self.models.items() if asked != "auto" or kind.regions]:
                self._try(models)
            if asked is None and not self._differs and not self.memory.asked.get("fullgraph"):
                self._try([model for model in self.failed if self._can_be_in_parts(model)])

    def _try(self, models: list[str]) -> None:
        """Build these models: over wide ranges, else over the sizes that were seen."""
        for wide in (True, False):
            self._each(models, functools.partial(self._build, wide=wide))
            models = [model for model in models if model in self.failed]
            if not models or self._manifest(models, True) == self._manifest(models, False):
                break

    def _each(self, models: list[str], act: Callable[[list[str]], dict[str, str]]) -> None:
        """Act on these models; on one at a time where the user's code fails, as the reason is that of one of them."""
        try:
            reasons = act(models) if models else {}
        except Exception as error:
            if len(models) > 1:
                for model in models:
                    self._each([model], act)
                return
            traceback.print_exc()
            reasons = {models[0]: str(error) if isinstance(error, AotcError) else f"{type(error).__name__}: {error}"}
        for model in models:
            self.failed.pop(model, None)
        self.failed |= {model: f"{reason}\nlog: {self.place.log}" for model, reason in reasons.items()}

    def _manifest(self, models: list[str], wide: bool) -> tuple[str, dict[str, list[Dims]]]:
        from aotc.tools.remembering.memory.manifest import manifest_of

        return manifest_of(self.memory, {model: self.models[model] for model in models}, self.place.folder, wide=wide)

    def _build(self, models: list[str], *, wide: bool) -> dict[str, str]:
        """Build these models; the reasons of those that failed. Raises what the user's code raises, and AotcError."""
        from aotc.compiler.messages import Settings
        from aotc.compiler.mistakes import check_settings, read_checked
        from aotc.compiler.pipeline import build
        from aotc.compiler.request import BuildRequest
        from aotc.tools.recording.check_written import check_written

        text, sizes = self._manifest(models, wide)
        self.place.manifest.write_text(text)
        manifest = read_checked(self.place.manifest)
        if self._differs is None:
            self._differs = self._differences(manifest.models[models[0]])
        if self._differs:
            return dict.fromkeys(models, self._differs)
        if self.memory.changed and self._find_counters(manifest.models):
            self.place.manifest.write_text(self._manifest(models, wide)[0])
            manifest = read_checked(self.place.manifest)
        sizes_of = (bucket.values() for spec in manifest.models.values() for bucket in spec.buckets)
        if not all(isinstance(size, int) for each in sizes_of for size in each):  # it mends ranges
            check_written(self.place.manifest, sizes, CHECK_SECONDS)
            manifest = read_checked(self.place.manifest)
        check_settings(manifest)
        settings = Settings(jobs=self.job.cores or None)
        report = build(BuildRequest(manifest, Path(self.job.store), settings=settings), self.servers, self.progress)
        for model in report.bundles:
            self.models[model].regions = list(manifest.models[model].regions)
        reasons = dict(report.unpublished)
        for each in report.failed:
            line = each.error.fields.get("source") if each.error else ""
            reasons[each.model] = f"{each.bucket}{line and f', at {line}'}: {each.error}"
        return {model: reason for model, reason in reasons.items() if model not in report.bundles}

    def _differences(self, spec: ModelSpec) -> str:
        """How what the factory makes differs from the program's module, which is found here before hours of compiling,
        and not by the load; "" if it does not. Raises what the factory raises."""
        from aotc.models.factory import build_module
        from aotc.tools.remembering.memory.identity import differences, structure_facts, structure_of

        try:
            made = build_module(spec, self.place.folder, dummy_weights=True)
        except Exception:  # of a factory that reads the weights' values
            made = build_module(spec, self.place.folder)
        found = list(differences(structure_of(self.memory.facts), structure_facts(made)))
        if not found:
            return ""
        return (
            f"the factory {spec.factory} does not make the module as the program has it: {listed(found, 5)}\n"
            "hint: name a factory that puts in adapters and replaces parts and forwards, too: "
            "aotc.compile(model, factory=…)"
        )

    def _find_counters(self, specs: Mapping[str, ModelSpec]) -> bool:
        """Try which of the attributes that calls change are counters, and let the factory mark these. Whether there are
        any. Raises what the factory raises."""
        from aotc.models.calls import modes_of
        from aotc.models.factory import build_module
        from aotc.tools.remembering.building.counting_attributes import counters_of, example_calls, with_counters
        from aotc.tools.remembering.memory.remembered_calls import from_json

        names, self.memory.changed = self.memory.changed, []
        for model, spec in specs.items():
            module = build_module(spec, self.place.folder)
            modes = functools.partial(modes_of, spec, "cpu")
            call = getattr(module, spec.method) if spec.method else module
            calls = example_calls(call, from_json(self.models[model].calls[0]), modes)
            self.models[model].counters = counters_of(module, calls, names)
        common = set.intersection(*(set(self.models[model].counters) for model in specs))
        for model in specs:
            self.models[model].counters = {name: n for name, n in self.models[model].counters.items() if name in common}
        if common:
            nested = {"factory": self.memory.factory, "kwargs": self.memory.kwargs}
            self.memory.factory = f"{with_counters.__module__}:{with_counters.__name__}"
            self.memory.kwargs = {"module": nested, "counters": sorted(common)}
        return bool(common)

    def _find_regions(self, models: list[str], *, if_not_whole: bool = False) -> dict[str, str]:
        """Choose regions for these models; the reasons of those that have none. Raises as `_build`."""
        from aotc.compiler.capture.regions.suggest_regions import suggest_regions
        from aotc.compiler.mistakes import read_checked

        self.progress.say("looks for repeated submodules that can be compiled by themselves")
        self.place.manifest.write_text(self._manifest(models, True)[0])
        reasons: dict[str, str] = {}
        for model, spec in read_checked(self.place.manifest).models.items():
            found = suggest_regions(spec, self.place.folder)
            if if_not_whole and found.whole is None:
                reasons[model] = "it can be captured whole"
            elif not found.regions:
                tried = "; ".join(f"{each.pattern}: {each.problem}" for each in found.candidates)
                reasons[model] = f"none of its repeated submodules can be a region: {tried or 'it has none'}"
            else:
                self.models[model].regions = list(found.regions)
        return reasons

    def _can_be_in_parts(self, model: str) -> bool:
        """Whether a model that failed cannot be captured whole, and regions were found for it."""
        try:
            return not self.models[model].regions and not self._find_regions([model], if_not_whole=True)
        except Exception:
            traceback.print_exc()
            return False


if __name__ == "__main__":
    main()
