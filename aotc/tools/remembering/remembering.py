"""The calls of a module that is compiled as it is used: in eager, recorded, or by compiled code when there is some."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MethodType
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import nn

from aotc.amounts import counted, listed
from aotc.errors import AotcError, BindError, GradientError, ManifestError, NotFoundError
from aotc.machine.processes import last_lines
from aotc.reads.tensors import plain_state
from aotc.records import Artifact
from aotc.runtime.call import CompiledCall
from aotc.runtime.forks import renew_in_child
from aotc.runtime.load import load
from aotc.runtime.state.gate import Gate
from aotc.store.reference import is_registry, is_remote
from aotc.tools.remembering.builds import Builds
from aotc.tools.remembering.forms import ambient_here, form_of, records_gradients
from aotc.tools.remembering.identity import Facts, attribute_facts, differences, facts_of, name_of, without_changes
from aotc.tools.remembering.memory import MOST_CALLS, MOST_KINDS, Kind, Memory, Place, remembered_in
from aotc.tools.remembering.region_calls import RegionCode, in_eager, parts_free

_log = logging.getLogger("aotc")

When = Literal["background", "exit", "now", "never"]

MOST_MISSES = 3
"""Misses of one form until its calls are made in eager at once: to explain a miss takes milliseconds."""
MOST_FORMS = 4096
MOST_CHANGES = 8
"""Changes of a module, as to another dtype, after which its calls stay in eager."""


class Options(NamedTuple):
    """The arguments of `aotc.compile` but for the module."""

    factory: str | None
    kwargs: Mapping[str, Any] | None
    store: str
    ranges: Mapping[str, Sequence[int]]
    mode: str
    build: When
    seconds: float
    cores: int
    builds: int
    retry: bool
    train: bool = False
    regions: Sequence[str] | Literal["auto"] | None = None
    gpu: bool = False
    method: str = ""

    @property
    def url(self) -> str:
        """Where the store is a remote one, that this process works in a copy of; "" for any other."""
        return self.store if is_remote(self.store) and self.build != "never" else ""

    @property
    def asked(self) -> dict[str, Any]:
        """What another build would be needed for."""
        ranges = {dim: list(ends) for dim, ends in self.ranges.items()}
        asked: dict[str, Any] = {"factory": self.factory, "kwargs": self.kwargs, "mode": self.mode, "ranges": ranges}
        regions = self.regions if self.regions == "auto" else list(self.regions or ())
        asked |= {"train": self.train, "regions": regions, "method": self.method}
        return {name: value for name, value in asked.items() if value}


class State(NamedTuple):
    """What `explain()` tells: of the `forms` seen, `built` have code; `models` are loaded; `failed` has reasons by
    model; and `notes` say why calls run in eager."""

    name: str
    store: str
    forms: int
    built: int
    building: bool
    models: tuple[str, ...]
    failed: dict[str, str]
    notes: tuple[str, ...]

    def line(self) -> str:
        return str(self).replace("\n  ", "; ")

    def __str__(self) -> str:
        being = f"; {self.forms - self.built} being built" if self.building else ""
        first = f"{self.name}: {self.built} of {counted(self.forms, 'form')} from {self.store}{being}"
        loaded = f"loaded: {listed(self.models, 3)}" if self.models else "nothing is loaded: calls run in eager"
        failed = [f"{model} failed: {reason}" for model, reason in self.failed.items()]
        return "\n  ".join([first, loaded, *failed, *self.notes])


class Remembering:
    """The calls of one module. Many threads may call."""

    def __init__(self, module: nn.Module, method: MethodType | None, options: Options) -> None:
        """`method`: whose calls these are, in the place of the module's own."""
        name = method.__name__ if method is not None and method.__name__ != "forward" else ""
        self.module, self.options = module, options._replace(method=name)
        self._own: Callable[..., Any] = method or module
        self._only: CompiledCall | None = None
        """All the code that there is: it is asked at once, and a call that it does not take is a miss."""
        self._eager: Callable[..., Any] = self._own
        """The module, or the method; whose regions run in eager, too."""
        self._regions: list[RegionCode] = []
        self._runs: dict[Hashable, Callable[..., Any]] = {}
        """What runs the calls of each form that came."""
        self._compiled: list[CompiledCall] = []
        self._misses: Counter[Hashable] = Counter()
        self._built_then: list[int] = []
        """How many forms of each kind had code when code was loaded."""
        self._notes: dict[str, str] = {}
        self._lock = threading.RLock()
        self._gate = Gate()
        """Inside are calls that record gradients: while code is loaded into regions, it would lose them."""
        self._began = self._is_stale = False
        self._retry = options.retry
        self._changes = 0
        self._place: Place | None = None
        self._facts: Facts = {}
        self._by_calls: dict[str, str | None] = {}
        """The attributes that calls in eager have changed, as they were before: these make no other name."""
        self._name = ""
        self._device = "cpu"
        self._store = options.store
        """What code is loaded from: of a remote one, its copy on this host, or itself where nothing is built."""
        self._tables: list[Mapping[str, Any]] = []
        self.builds = Builds(options, self._note, self._ended)
        _live.add(self)
        renew_in_child(self, Remembering._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()
        self.builds.renew()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_in_mode:
            told = "calls in training mode run in eager: model.eval() for inference, or aotc.compile(model, train=True)"
            return self._in_eager(told, args, kwargs)
        if (
            not self.options.train
            and torch.is_grad_enabled()
            and records_gradients(self._tables or self._parameters(), args, kwargs)
        ):
            told = "calls that record gradients run in eager: call it within torch.no_grad() or torch.inference_mode()"
            return self._gate.run_inside(lambda: self._in_eager(told, args, kwargs))
        if (only := self._only) is not None:
            return self._checked(only, *args, **kwargs)
        form = form_of(args, kwargs, self._device)
        return (self._runs.get(form) or self._first(form, args, kwargs))(*args, **kwargs)

    @property
    def _is_in_mode(self) -> bool:
        """Whether the module is in the mode whose calls are compiled: training, or not."""
        return self.module.training is self.options.train

    # -- a call -------------------------------------------------------------------------------------------------------

    def _in_eager(self, why: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._note(why)
        return self._eager(*args, **kwargs)

    def _checked(self, compiled: CompiledCall, *args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except (BindError, GradientError) as error:  # found before any of it ran
            self._changed(compiled, error)
        return self._eager(*args, **kwargs)

    def _by_regions(self, code: RegionCode, *args: Any, **kwargs: Any) -> Any:
        return self._ran_by_regions(code, args, kwargs)[0]

    def _ran_by_regions(self, code: RegionCode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, bool]:
        """The result, and whether code ran in all regions."""
        try:
            result, run = code.run(args, kwargs)
        except BindError as error:  # regions were replaced: found before any of it ran
            self._changed(code.call, error)
            return self._eager(*args, **kwargs), False
        if run.error is not None:
            self._changed(code.call, run.error)
        return result, not run.missed and run.error is None

    def _first(self, form: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """What runs calls of a form that came for the first time, since code was loaded."""
        with self._lock:
            if not self._began or self._is_stale:
                self._begin()
            if len(self._runs) >= MOST_FORMS:
                self._runs.clear()
            for compiled in self._compiled if not self._regions else ():
                with suppress(TypeError):  # the arguments are those of another kind of calls
                    if compiled.explain(*args, **kwargs).kind != "miss":
                        run = self._runs[form] = functools.partial(self._checked, compiled)
                        return run
            return functools.partial(self._uncovered, form)

    def _missed(self, error: AotcError, *args: Any, **kwargs: Any) -> Any:
        """A call that the code which was asked does not take: of another form, or one that a guard refuses."""
        self._only = None
        return self._uncovered(form_of(args, kwargs, self._device), *args, **kwargs)

    def _uncovered(self, form: Hashable, *args: Any, **kwargs: Any) -> Any:
        """Run the module for a call that no code is known to take; remember the call if it succeeds, and see that code
        comes."""
        builds = self._place is not None and self.options.build != "never"
        if not builds and not self._regions:
            self._refused_again(form)
            return self._eager(*args, **kwargs)
        from aotc.tools.remembering.manifest import as_json, seen_call

        try:
            seen = as_json(seen_call(self.module, self._own, args, kwargs, gradients=self.options.train))
        except ManifestError as error:  # looked at before the module may write to it
            self._note(f"calls with what no manifest holds run in eager: {error}")
            self._runs[form] = self._eager
            return self._eager(*args, **kwargs)
        if builds:
            with self._lock:
                self._find_made()
        before = attribute_facts(self.module)
        if (code := self._regions_for(seen)) is not None:
            result, is_covered = self._ran_by_regions(code, args, kwargs)
            if is_covered:
                self._runs[form] = functools.partial(self._by_regions, code)
                return result
        else:
            result = self._eager(*args, **kwargs)
        self._note_changes(before)
        if not builds:
            self._refused_again(form)
            return result
        with self._lock:
            lacking = self._remember(seen)
            if lacking == "load":
                self._stale()
            elif lacking == "build":
                if not self._is_stale:
                    self._runs[form] = self._eager
                self.builds.soon()
            else:
                self._refused_again(form)
        if lacking == "build" and self.options.build == "now":
            self.wait()
        return result

    def _note_changes(self, before: Facts) -> None:
        """Keep the attributes as they were `before` a call, of those that the call has changed."""
        now = attribute_facts(self.module)
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                self._by_calls.setdefault(name, before.get(name))

    def _refused_again(self, form: Hashable) -> None:
        """Of a form that gets no code: to ask all code, and to explain a miss, takes milliseconds."""
        self._misses[form] += 1
        if self._misses[form] >= MOST_MISSES:
            self._runs[form] = self._eager
            told = "; `compiled.explain` of the model in the store says why" if self._compiled else ""
            self._note(f"calls that no code takes run in eager, as one of {_short(form)}{told}", "no code takes")

    def _changed(self, compiled: CompiledCall, error: AotcError) -> None:
        """The module is no longer what was loaded for: begin anew, at the next call."""
        with self._lock:
            if not any(compiled is each for each in self._compiled):
                return  # another thread has seen it before
            self._changes += 1
            _log.info("aotc.compile: %s has changed: %s", self._name, error)
            self._forget_code()
            self._began = self._changes > MOST_CHANGES
            if self._began:
                self._place = self.builds.place = None
                self._note(f"the module changed {self._changes} times; its calls stay in eager")

    # -- what is remembered -------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Mapping[str, Any]]:
        return [part._parameters for part in self.module.modules()]

    def _begin(self) -> None:
        """Find out what the module is, and load the code that there is for it."""
        self._began, self._place = True, None
        self.builds.place = self.builds.made = None
        self._tables = self._parameters()
        self._facts = without_changes(facts_of(self.module, self.options.asked), self._by_calls)
        self._device = "cuda" if self._facts["target"].startswith("cuda:") else "cpu"
        self.builds.uses_gpu = self._device == "cuda"
        self._name = name_of(self._facts)
        try:
            if self.options.url:
                from aotc.tools.remembering.remote_memory import copy_of

                self._store = str(copy_of(self.options.url))
            if not is_remote(self._store):
                self._place = self.builds.place = Place(remembered_in(self._store), self._name)
                if self._retry:
                    self._place.forget_failures()
                    self._retry = False
                if self.options.url and self._place.read() is None:
                    self._pull(self._place)
            self._load()
            place, state = self._place, self.state()
            if place is not None and not state.forms and (before := place.latest_of_class(self._facts)) is not None:
                changed = list(differences(before.facts, self._facts))
                _log.warning("aotc.compile: %s is new: %s", self._name, listed(changed, 5))
        except (AotcError, OSError) as error:
            self._place = self.builds.place = None
            self._note(f"{self.options.store} cannot be used: {error}")
            return
        _log.info("aotc.compile: %s", state.line())
        if place is None or self.options.build == "never":
            return
        try:
            memory = place.read()
            if memory is None or self.builds.is_due(place, memory):
                self._find_made()
            if self.builds.is_due(place, memory):
                self.builds.soon()
        except (AotcError, OSError) as error:
            self._build_nothing(error)

    def _pull(self, place: Place) -> None:
        """Bring what other machines have built to this one."""
        from aotc.tools.remembering.remote_memory import LOAD_ATTEMPTS, RemoteMemory

        try:
            RemoteMemory(self.options.url, place, attempts=LOAD_ATTEMPTS).pull(self._new_memory)
        except (AotcError, OSError) as error:
            self._note(f"{self.options.url} cannot be read: {error}")

    def _load(self) -> None:
        """Load all code that there is for the module as it is."""
        self._forget_code()
        if self.options.build != "never" and not (Path(self._store) / "oci-layout").exists():
            self._built_then = []
            return  # the first call that is remembered makes the store
        with parts_free(self.module):
            self._gate.run_alone(self._load_all)
        for code in self._regions:
            code.put()
            self._eager = functools.partial(in_eager, self._own)
        self._only = self._compiled[0] if len(self._compiled) == 1 and not self._regions else None

    def _load_all(self) -> None:
        store = self._store
        memory = self._place.read() if self._place is not None else None
        self._built_then = [kind.built for kind in memory.kinds] if memory else []
        for kind in range(len(memory.kinds)) if memory else itertools.count():
            model = f"{self._name}-{kind + 1}" if kind else self._name
            ref = f"{store}/{model}" if is_registry(store) else model
            try:
                compiled = load(ref, self.module, store=None if is_registry(store) else store, on_miss="eager")
            except NotFoundError as error:
                if memory is None:
                    break
                if memory.kinds[kind].built:
                    self._build_anew(kind, error)
            except BindError as error:
                self._refused(kind, model, memory, error)
            except AotcError as error:
                self._note(f"{model} cannot be loaded: {error}")
                break
            else:
                call: CompiledCall = getattr(compiled, self.options.method or "forward")
                self._compiled.append(call)
                if compiled.artifact.regions:
                    self._regions.append(RegionCode(call, kind))
                    self._note_regions(compiled.artifact, memory)
                else:
                    call.on_miss = self._missed

    def _note_regions(self, artifact: Artifact, memory: Memory | None) -> None:
        """Log that a model is compiled by regions, where `regions` was not given."""
        if memory is not None and self.options.regions is None:
            parts = listed([region.name for region in artifact.regions], 3)
            self._note(
                f"{artifact.model} cannot be captured whole: of it, these regions and their like have code: {parts}"
            )

    def _regions_for(self, seen: dict[str, Any]) -> RegionCode | None:
        """The code by regions for calls of this kind."""
        if len(self._regions) < 2 or self._place is None:
            return self._regions[0] if self._regions else None
        memory = self._place.read()
        number = memory.kind_of(seen, ambient_here(self._device)) if memory is not None else None
        return next((code for code in self._regions if code.kind == number), None)

    def _refused(self, kind: int, model: str, memory: Memory | None, error: BindError) -> None:
        """Code that is there was built from another module, though by the same name: the factory makes another one now,
        say. It is built anew, but not if it was built just now."""
        if memory is None or self._place is None or self.options.build == "never":
            self._note(f"{model} is not for this module: {error}")
        elif self._by_calls:
            self._note(
                f"a call in eager has changed {listed([*self._by_calls], 3)}: calls run in eager, and the next run "
                f"loads {model}; keep in a buffer what forward changes. {error}"
            )
        elif self._name in self.builds.own:
            self._place.fail(kind, f"what the factory makes is another module: {error}")
            self._unbuilt(kind)
            self._note(f"{model} was built from another module: {error}")
        else:
            self._build_anew(kind, error)

    def _build_anew(self, kind: int, error: AotcError) -> None:
        if self._place is None or self.options.build == "never":
            return
        if reason := self._place.failed(kind):
            self._note(f"{self._place.model(kind)} cannot be built: {reason}")
            return
        _log.warning("aotc.compile: %s is built anew: %s", self._place.model(kind), error)
        self._unbuilt(kind)

    def _unbuilt(self, kind: int) -> None:
        assert self._place is not None
        self._place.change(None, lambda memory: setattr(memory.kinds[kind], "built", 0))
        self._built_then[kind] = 0

    def _forget_code(self) -> None:
        self._only, self._compiled, self._regions, self._is_stale = None, [], [], False
        self._runs.clear()
        self._misses.clear()

    def _stale(self) -> None:
        """Let the next call load what there is."""
        self._only, self._is_stale = None, True
        self._runs.clear()

    def _remember(self, seen: dict[str, Any]) -> Literal["", "build", "load"]:
        """Keep a call that the loaded code does not take. What its form lacks: code, code that is loaded, or nothing,
        where code cannot be built, or refuses the call."""
        from aotc.store.layout.store import Store

        ambient = ambient_here(self._device)
        number = -1

        def keep(memory: Memory) -> bool:
            nonlocal number
            if (found := memory.kind_of(seen, ambient)) is None:
                if len(memory.kinds) == MOST_KINDS:
                    self._note(f"calls of more than {MOST_KINDS} kinds: pass a number that varies as a tensor")
                    return False
                found = len(memory.kinds)
                memory.kinds.append(Kind(ambient))
            number, kind = found, memory.kinds[found]
            if kind.has(seen):
                return False
            if len(kind.calls) == MOST_CALLS:
                self._note(f"calls of more than {MOST_CALLS} sizes: name ranges=, or pad them", "sizes")
                return False
            kind.calls.append(seen)
            return True

        with self._lock:
            try:
                if self._place is None or (made := self.builds.made) is None:
                    return ""
                Store.create(self._store)
                memory = self._place.change(msgspec.structs.replace(made, kinds=[]), keep)
                if memory is None or number < 0:
                    return ""
                if reason := self._place.failed(number):
                    self._note(f"{self._place.model(number)} cannot be built: {reason}")
                    return ""
                kind = memory.kinds[number]
                then = self._built_then[number] if number < len(self._built_then) else 0
                return "build" if kind.built < len(kind.calls) else "load" if kind.built > then else ""
            except (AotcError, OSError) as error:
                self._build_nothing(error)
                return ""

    def _build_nothing(self, why: Exception) -> None:
        self._note(f"nothing is built: {why}")
        self._place = self.builds.place = None

    def _find_made(self) -> None:
        """Find out how a build makes the module, before a call may change it, if that was not needed so far."""
        if self.builds.made is None and self._place is not None:
            try:
                self.builds.made = self._new_memory()
            except AotcError as error:
                self._build_nothing(error)

    def _new_memory(self) -> Memory:
        """How a build makes the module, with no calls yet. Raises ManifestError where that is not known."""
        from aotc.tools.remembering.manifest import dtype_to_cast, made_from

        made = made_from(self.module, self.options.factory, self.options.kwargs)
        size = sum(tensor.nbytes for tensor in plain_state(self.module).values())
        cast = dtype_to_cast(self.module)
        return Memory(self._facts, self.options.asked, made.factory, made.kwargs, cast, state_bytes=size)

    # -- builds -------------------------------------------------------------------------------------------------------

    def _ended(self, place: Place, status: int) -> None:
        """A build has ended: let the next call load what there is, and tell what failed."""
        with self._lock:
            if place.name != self._name:  # the module has changed meanwhile
                return self.builds.soon()
            if status:
                self._note(f"the build ended with status {status}: {' | '.join(last_lines(place.log, 2))}")
            self._stale()
            try:
                for model, reason in self.state().failed.items():
                    self._note(f"{model} cannot be built: {reason}; to try again, remove {place.folder}/{model}.failed")
                memory = place.read()
                if not status and memory is not None and place.unbuilt(memory):
                    self.builds.soon()
            except (AotcError, OSError) as error:
                self._note(f"{place.folder} cannot be read: {error}")
            return None

    def wait(self, timeout: float | None = None) -> bool:
        """Build what has no code yet, wait for that, and load it. Whether all that was seen has code now; and it is
        loaded, if the module is in the mode of these calls."""
        with self._lock:
            if not self._began and self._is_in_mode:
                self._begin()
        if not self.builds.wait(timeout):
            return False
        with self._lock:
            if self._is_in_mode:
                self._begin()
            else:
                self._stale()
        state = self.state()
        is_loaded = not self._is_in_mode or len(state.models) == len(self._built_then)
        return 0 < state.forms == state.built and not state.failed and is_loaded

    # -- looking in ---------------------------------------------------------------------------------------------------

    def _note(self, text: str, about: str = "") -> None:
        """Tell a reason why calls run in eager, once; of several `about` the same, the first."""
        if (about or text) not in self._notes:
            self._notes[about or text] = text
            _log.warning("aotc.compile: %s: %s", self._name or type(self.module).__name__, text)

    def state(self) -> State:
        """As `Remembered.explain`."""
        place = self._place
        memory = place.read() if place is not None else None
        kinds = memory.kinds if memory is not None else []
        failed = {place.model(n): why for n in range(len(kinds)) if (why := place.failed(n))} if place else {}
        return State(
            name=self._name or type(self.module).__name__,
            store=self.options.store,
            forms=sum(len(kind.calls) for kind in kinds),
            built=sum(kind.built for kind in kinds),
            building=place is not None and place.is_being_built(),
            models=tuple(compiled.artifact.model for compiled in self._compiled),
            failed=failed,
            notes=tuple(self._notes.values()),
        )


_live: weakref.WeakSet[Remembering] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Begin the builds that have not begun; the process that builds outlives this one."""
    for each in list(_live):
        if each.options.build == "exit":
            each.builds.wait(None)
        else:
            each.builds.start()
        if os.environ.get("AOTC_COMPILE") == "report":
            with suppress(AotcError, OSError):
                _log.info("aotc.compile: %s", each.state().line())


def _short(form: Hashable) -> str:
    text = repr(form)
    return text if len(text) <= 120 else f"{text[:119]}…"
