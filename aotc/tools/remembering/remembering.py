"""The calls of a module that is compiled as it is used: in eager, recorded, or by compiled code when there is some."""

from __future__ import annotations

import atexit
import functools
import html
import itertools
import logging
import os
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MethodType
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import nn

from aotc.amounts import counted, listed
from aotc.errors import AotcError, BindError, CorruptError, GradientError, ManifestError, MissError, NotFoundError
from aotc.machine.processes import last_lines
from aotc.reads.sources import cells_file
from aotc.reads.tensors import plain_state
from aotc.reads.watch import ModuleWatch
from aotc.records import Artifact
from aotc.runtime.call import CompiledCall
from aotc.runtime.forks import renew_in_child
from aotc.runtime.load import load
from aotc.runtime.state.read_write_lock import ReadWriteLock
from aotc.store.reference import is_registry, is_remote
from aotc.tools.remembering.builds import Builds
from aotc.tools.remembering.call_counts import CallCounter, CallCounts, in_words
from aotc.tools.remembering.counting_attributes import Counting
from aotc.tools.remembering.forms import CallLike, ambient_here, form_of, records_gradients
from aotc.tools.remembering.identity import (
    IdentityFacts,
    attribute_facts,
    differences,
    facts_of,
    name_of,
    without_changes,
)
from aotc.tools.remembering.memory import MOST_CALLS, MOST_KINDS, Kind, Memory, Place, remembered_in
from aotc.tools.remembering.module_look import ModuleLook
from aotc.tools.remembering.region_calls import RegionCode, in_eager, parts_free
from aotc.tools.remembering.while_waiting import write_line

_log = logging.getLogger("aotc")

When = Literal["background", "exit", "now", "never"]

MOST_MISSES = 3
"""Misses of one form until its calls are made in eager at once: to explain a miss takes milliseconds."""
MOST_FORMS = 4096
MOST_TRIED = 256
"""Forms of which a call is kept, without values, to try the code that is loaded."""
MOST_NOTES = 64
"""Reasons that are told of one module; `stats()` has those of all forms."""

_REFUSED = object()
_FAILED = "failed "
"""Begins what notes of builds that failed are about."""
_BEYOND = f"calls of more than {MOST_KINDS} kinds were made: pass a number that varies as a tensor"
_UNSEEN = "a form that cannot be looked at"
_STRICT = 'wait() for the build, or leave on_miss="error" out to run such calls in eager; stats() has all reasons'
MOST_CHANGES = 8
"""Changes of a module to what it never was, as to another dtype, after which only code that is loaded runs."""
MOST_LOADED = 8
"""Sets of facts whose code stays loaded: of a base model and of each adapter, say."""

_OF_FACTS = (
    *("_facts", "_name", "_look", "_tables", "_place", "_made", "_compiled", "_only", "_regions", "_eager", "_runs"),
    *("_whys", "_misses", "_like", "_built_then", "_former", "_is_stale", "_known_kinds", "_counting"),
)
"""The attributes of `Remembering` that are those of the module as it is, and are put aside while it is another."""


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
    on_miss: Literal["eager", "error"] = "eager"
    fullgraph: bool = False
    dynamic: bool | None = None

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
        given = {name: value for name, value in (asked | {"fullgraph": self.fullgraph}).items() if value}
        return given if self.dynamic is None else given | {"dynamic": self.dynamic}


class CompileState(NamedTuple):
    """What `explain()` tells: of the `forms` seen, `built` have code; `models` are loaded; `failed` has reasons by
    model; `notes` say why calls run in eager; and `calls` were made, as `stats()` counts them."""

    name: str
    store: str
    forms: int
    built: int
    building: bool
    models: tuple[str, ...]
    failed: dict[str, str]
    notes: tuple[str, ...]
    calls: CallCounts = CallCounts(0, 0, ())

    def line(self) -> str:
        return str(self).replace("\n  ", "; ")

    def __str__(self) -> str:
        being = f"; {self.forms - self.built} being built" if self.building else ""
        first = f"{self.name}: {self.built} of {counted(self.forms, 'form')} from {self.store}{being}"
        loaded = f"loaded: {listed(self.models, 3)}" if self.models else "nothing is loaded: calls run in eager"
        failed = [f"{model} failed: {in_line(reason)}" for model, reason in self.failed.items()]
        notes = [note for note in self.notes if not any(in_line(reason) in note for reason in self.failed.values())]
        return "\n  ".join([first, loaded, self.calls.line(), *failed, *notes])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        lines = "".join(f"<li>{html.escape(line.strip())}</li>" for line in str(self).split("\n"))
        return f"<ul>{lines}</ul>{self.calls._repr_html_()}"


class Remembering:
    """The calls of one module. Many threads may call."""

    def __init__(self, module: nn.Module, method: MethodType | None, options: Options) -> None:
        """`method`: whose calls these are, in the place of the module's own."""
        name = method.__name__ if method is not None and method.__name__ != "forward" else ""
        self.module, self.options = module, options._replace(method=name)
        self._own: Callable[..., Any] = method or module
        self._aside: dict[str, dict[str, Any]] = {}
        """What is known of the module as it was before, by its name then."""
        self._begin_afresh()
        self._notes: dict[str, str] = {}
        self._lock = threading.RLock()
        self._gate = ReadWriteLock()
        """Inside are calls that record gradients: while code is loaded into regions, it would lose them."""
        self._began = self._is_lost = False
        self._retry = options.retry
        self._changes = 0
        self._no_cells: ManifestError | OSError | None = None
        """Why no file can have the module's classes of a notebook's cells."""
        self.is_reported = False
        """Whether `AOTC_COMPILE=report` has told what there is at the start."""
        self.by_calls: dict[str, str | None] = {}
        """The attributes that calls in eager have changed, as they were before: these make no other name."""
        self._device = "cpu"
        self._store = options.store
        """What code is loaded from: of a remote one, its copy on this host, or itself where nothing is built."""
        self.counter = CallCounter("train" if options.train else "inference")
        self.builds = Builds(options, self._note, self._ended)
        _live.add(self)
        renew_in_child(self, Remembering._renew)

    def _begin_afresh(self) -> None:
        """Know nothing of the module as it is."""
        self._facts: IdentityFacts = {}
        self._name = ""
        self._look: ModuleLook | None = None
        self._tables: list[Mapping[str, Any]] = []
        self._place: Place | None = None
        self._made: Memory | None = None
        self._only: CompiledCall | None = None
        """All the code that there is: it is asked at once, and a call that it does not take is a miss."""
        self._eager: Callable[..., Any] = self._own
        """The module, or the method; whose regions run in eager, too."""
        self._regions: list[RegionCode] = []
        self._runs: dict[Hashable, Callable[..., Any]] = {}
        """The code that runs the calls of each form that came."""
        self._whys: dict[Hashable, str] = {}
        """Why the calls of a form run in eager."""
        self._compiled: list[CompiledCall] = []
        self._misses: Counter[Hashable] = Counter()
        self._like: dict[Hashable, CallLike] = {}
        """Of the forms that were remembered, a call each: by these `wait` tries the code."""
        self._built_then: list[int] = []
        """How many forms of each kind had code when code was loaded."""
        self._former: list[CompiledCall] = []
        """Code that refused what the module's look does not show, as a global variable: it may be as it was again."""
        self._is_stale = False
        self._counting: Counting | None = None
        self._known_kinds: set[object] = set()
        """The kinds of calls that are remembered, once there are as many as may be."""

    def _renew(self) -> None:
        self._lock = threading.RLock()
        self.counter.renew()
        self.builds.renew()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if "forward" in vars(self.module) and self._own is self.module:
            from aotc.tools.remembering.wrapped_forward import wrapped_forward

            if (wrapped := wrapped_forward(self.module)) is not None:
                return wrapped.around(self._call)(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _call(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            run = self._run_of(args, kwargs)
        except Exception as error:  # what cannot be looked at, eager may take
            run = functools.partial(self._in_eager, _UNSEEN, self._unseen(error))
        return run(*args, **kwargs)

    def _run_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """What runs a call. Its arguments may be of any kind, and raise anything when they are looked at."""
        if not self._is_in_mode:
            return self._out_of_mode
        if (
            not self.options.train
            and torch.is_grad_enabled()
            and records_gradients(self._tables or self._parameters(), args, kwargs)
        ):
            return self._with_gradients
        if (only := self._only) is not None:
            return functools.partial(self._checked, only)
        form = form_of(args, kwargs, self._device)
        if (run := self._runs.get(form)) is not None:
            return run
        if self._began and self._has_changed():
            self._look_again()
            if (only := self._only) is not None:
                return functools.partial(self._checked, only)
            if (run := self._runs.get(form)) is not None:
                return run
        if self._is_lost:
            return functools.partial(self._in_eager, form, f"the module changed {self._changes} times")
        if (why := self._whys.get(form)) is not None:
            return functools.partial(self._watched, form, why)
        if self._known_kinds and self._is_beyond(args, kwargs):
            return functools.partial(self._watched, _BEYOND, _BEYOND)
        return self._first(form, args, kwargs)

    @property
    def _is_in_mode(self) -> bool:
        """Whether the module is in the mode whose calls are compiled: training, or not."""
        return self.module.training is self.options.train

    # -- a call -------------------------------------------------------------------------------------------------------

    def _in_eager(self, form: Hashable, why: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module, as all calls do that no code runs. Raises MissError instead, if that is asked."""
        self.counter.ran_eager("train" if self.module.training else "inference", form, why)
        if self.options.on_miss == "error":
            raise MissError(f"{self._called()}: a call of {in_words(form)} would run in eager: {why}", hint=_STRICT)
        return self._eager(*args, **kwargs)

    def _watched(self, form: Hashable, why: str, /, *args: Any, **kwargs: Any) -> Any:
        """As `_in_eager`, of a module that is as it was when it was looked at: then a call makes what differs after."""
        look = self._look
        result = self._in_eager(form, why, *args, **kwargs)
        if look is not None and look is self._look and not look.holds():
            with self._lock:
                self._note_changes(look)
        return result

    def _out_of_mode(self, /, *args: Any, **kwargs: Any) -> Any:
        self._note(
            "calls in training mode run in eager: model.eval() for inference, or aotc.compile(model, train=True)"
        )
        return self._in_eager("any form", "the module is in training mode, and train=True is not set", *args, **kwargs)

    def _with_gradients(self, /, *args: Any, **kwargs: Any) -> Any:
        self._note("calls that record gradients run in eager: call it within torch.no_grad() or torch.inference_mode()")
        why = "the call records gradients, outside of torch.no_grad()"
        return self._gate.run_inside(lambda: self._in_eager("any form", why, *args, **kwargs))

    def _unseen(self, error: Exception) -> str:
        """Note that a call cannot be looked at, and why; that in words."""
        why = f"it cannot be looked at: {type(error).__name__}: {in_line(error)[:200]}"
        self._note(f"a call runs in eager: {why}", f"unseen {type(error).__name__}")
        return why

    def _checked(self, compiled: CompiledCall, /, *args: Any, **kwargs: Any) -> Any:
        try:
            result = compiled(*args, **kwargs)
        except (BindError, GradientError) as error:  # found before any of it ran
            self._changed(compiled, error)
            run = self._run_of(args, kwargs)
            code = run.args[0] if isinstance(run, functools.partial) and run.func == self._checked else None
            if code is None:
                return run(*args, **kwargs)
            if code is not compiled:  # of the module as it is now
                with suppress(BindError, GradientError):
                    if (result := code(*args, **kwargs)) is not _REFUSED:
                        if self._counting is not None:
                            self._counting.add()
                        return result
            why = f"the module has changed: {in_line(error)}"
        except Exception as error:
            if _has_run(error):
                raise
            why = self._unseen(error)
        else:
            if result is not _REFUSED:
                if self._counting is not None:
                    self._counting.add()
                return result
            self._only = None
            if self._has_changed():  # to another dtype, say, as the arguments have
                self._look_again()
                return self._run_of(args, kwargs)(*args, **kwargs)
            return self._uncovered(None, *args, **kwargs)
        return self._in_eager(self._form(args, kwargs), why, *args, **kwargs)

    def _form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        """The form of a call, whatever its arguments are."""
        try:
            hash(form := form_of(args, kwargs, self._device))
        except Exception:
            return _UNSEEN
        return form

    def _by_regions(self, code: RegionCode, form: Hashable, /, *args: Any, **kwargs: Any) -> Any:
        return self._ran_by_regions(code, form, args, kwargs)[0]

    def _ran_by_regions(
        self, code: RegionCode, form: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, bool]:
        """The result, and whether code ran in all regions."""
        try:
            result, run = code.run(args, kwargs)
        except BindError as error:  # regions were replaced: found before any of it ran
            self._changed(code.call, error)
            return self._in_eager(form, f"the module has changed: {in_line(error)}", *args, **kwargs), False
        if run.error is not None:
            self._changed(code.call, run.error)
        is_covered = not run.missed and run.error is None
        if is_covered:
            self.counter.ran_compiled(f"{code.call.artifact.model}, by its regions")
        else:
            why = (
                f"the module has changed: {in_line(run.error)}" if run.error else "no code takes the calls of a region"
            )
            self.counter.ran_eager("train" if self.module.training else "inference", form, why)
        return result, is_covered

    def _first(self, form: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """What runs calls of a form that came for the first time, since code was loaded."""
        with self._lock:
            if not self._began or self._is_stale:
                self._begin()
            if len(self._runs) + len(self._whys) >= MOST_FORMS:
                self._runs.clear()
                self._whys.clear()
            for compiled in self._compiled if not self._regions else ():
                with suppress(TypeError):  # the arguments are those of another kind of calls
                    if compiled.explain(*args, **kwargs).kind != "miss":
                        run = self._runs[form] = functools.partial(self._checked, compiled)
                        return run
            return functools.partial(self._uncovered, form)

    def _is_beyond(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is of none of the kinds that are remembered, where there are as many as may be."""
        from aotc.tools.recording.seen_calls import bound_arguments, kind_of_call, without_extents

        try:
            bound = bound_arguments(self.module, args, kwargs, None if self._own is self.module else self._own)
            gradients = self.options.train and torch.is_grad_enabled()
            seen = {name: without_extents(value, gradients) for name, value in bound.items()}
            return (*ambient_here(self._device).items(), kind_of_call(seen)) not in self._known_kinds
        except Exception:  # `_uncovered` tells of it
            return False

    def _uncovered(self, form: Hashable, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module for a call that no code is known to take; remember the call if it succeeds, and see that code
        comes. `form` is None where it is not known yet."""
        form = self._form(args, kwargs) if form is None else form
        builds = self._place is not None and self.options.build != "never"
        if not builds and not self._regions:
            return self._in_eager(form, self._refused_again(form, args, kwargs), *args, **kwargs)
        if self._device == "cuda" and torch.cuda.is_current_stream_capturing():  # to look at values would end that
            return self._in_eager(form, "a CUDA graph is being captured, and its form is not known", *args, **kwargs)
        try:
            seen = self._seen(args, kwargs)
            if builds:
                with self._lock:
                    self._find_made()
            code = self._regions_for(seen)
        except ManifestError as error:  # looked at before the module may write to it
            self._note(f"calls with what no manifest holds run in eager: {in_line(error)}")
            run = self._eager_for(form, f"no manifest holds its arguments: {in_line(error)}")
            return run(*args, **kwargs)
        except Exception as error:  # eager may take it
            return self._eager_for(form, self._unseen(error))(*args, **kwargs)
        if self.options.fullgraph and (reason := self._failure_of(seen)):
            said = (
                f"{self._called()}: fullgraph=True, and a call of {in_words(form)} cannot be compiled whole: {reason}"
            )
            raise MissError(said, hint="leave fullgraph out: its repeated submodules are compiled, the rest is eager")
        if self.options.on_miss == "error" and builds and code is None:
            return self._built_or_refused(form, seen, args, kwargs)
        if code is not None:
            result, is_covered = self._ran_by_regions(code, form, args, kwargs)
            if is_covered:
                self._runs[form] = functools.partial(self._by_regions, code, form)
                return result
        else:
            result = self._watched(form, "it is new", *args, **kwargs)
        try:
            if not builds:
                self._refused_again(form, args, kwargs)
            elif self._keep(form, seen, args, kwargs) == "build" and self.options.build == "now":
                self.wait()
        except Exception as error:  # eager has run: its result is given, whatever comes of the code
            self._eager_for(form, self._unseen(error))
        return result

    def _built_or_refused(
        self, form: Hashable, seen: dict[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a call that may not run in eager by code that is built now, if that may be; else MissError is raised."""
        lacking = self._keep(form, seen, args, kwargs)
        if lacking == "load" or (lacking == "build" and self.options.build == "now" and self.wait()):
            with self._lock:
                self._begin()
            for compiled in self._compiled if not self._regions else ():
                if compiled.explain(*args, **kwargs).kind != "miss":
                    return self._checked(compiled, *args, **kwargs)
            if (code := self._regions_for(seen)) is not None:
                return self._ran_by_regions(code, form, args, kwargs)[0]
        return self._in_eager(form, self._why_not(lacking, args, kwargs), *args, **kwargs)

    def _seen(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call, as it is remembered. Raises ManifestError for what no manifest holds, and what arguments raise."""
        from aotc.tools.remembering.manifest import as_json, seen_call

        seen: dict[str, Any] = as_json(seen_call(self.module, self._own, args, kwargs, gradients=self.options.train))
        return seen

    def _failure_of(self, seen: dict[str, Any]) -> str:
        """Why calls of this kind have no code; "" where nothing has failed."""
        with suppress(AotcError, OSError):
            memory = self._place.read() if self._place is not None else None
            if self._place is None or memory is None:
                return ""
            number = memory.kind_of(seen, ambient_here(self._device))
            return in_line(self._place.failed(number)) if number is not None else ""
        return ""

    def _keep(
        self, form: Hashable, seen: dict[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Literal["", "build", "load"]:
        """Remember a call, and see that code comes; what its form lacks."""
        with self._lock:
            if len(self._like) < MOST_TRIED and form != _UNSEEN:
                self._like.setdefault(form, CallLike(args, kwargs, self._device))
            lacking = self._remember(seen)
            if lacking == "load":
                self._stale()
            elif lacking == "build":
                if not self._is_stale:
                    self._eager_for(form, self._why_not("build", args, kwargs))
                self.builds.soon()
            else:
                self._refused_again(form, args, kwargs, self._failure_of(seen))
        return lacking

    def _eager_for(self, form: Hashable, why: str) -> Callable[..., Any]:
        """Let calls of this form run in eager, and give what runs them."""
        if form != _UNSEEN:
            self._whys[form] = why
        return functools.partial(self._watched, form, why)

    def _why_not(self, lacking: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Why no code runs a call, in words."""
        if lacking == "build":
            if limit := self.builds.limit_reached():
                return limit
            when = {"exit": "at the program's end", "now": "now"}.get(self.options.build, "by another process")
            is_late = self.builds.uses_gpu and not self.options.gpu
            return f"code for this form is built {'at the end of the program' if is_late else when}"
        if lacking == "load":
            return "its code has just been built, and is loaded at the next call"
        from aotc.runtime.explain.misses import kind_of_miss

        for compiled in self._compiled:
            with suppress(Exception):
                if (explanation := compiled.explain(*args, **kwargs)).kind == "miss":
                    return f"no code takes it: {kind_of_miss(explanation)}"
        if self._compiled:
            return "no code takes it"
        if self.options.build == "never":
            return f'{self.options.store} has no code for this module, and build="never"'
        return next(reversed(self._notes.values()), "there is no code for it")

    def _note_changes(self, look: ModuleLook) -> None:
        """Keep the attributes as they were before a call, of those that the call has changed."""
        self._look, now = look.with_changes(), attribute_facts(self.module)
        before = {name: value for name, value in self._facts.items() if name.startswith("attribute ")}
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                self.by_calls.setdefault(name, before.get(name))
        if self._made is not None:
            self._made = self.builds.made = msgspec.structs.replace(self._made, changed=self._changed_names())

    def _changed_names(self) -> list[str]:
        return [name.removeprefix("attribute ") for name in self.by_calls]

    def _refused_again(self, form: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any], failure: str = "") -> str:
        """Why a call of a form that gets no code runs in eager. To ask all code, and to explain a miss, takes
        milliseconds: so calls of a form that came often do so at once."""
        why = f"its code cannot be built: {failure}" if failure else self._why_not("", args, kwargs)
        if len(self._misses) >= MOST_FORMS:
            self._misses.clear()
        self._misses[form] += 1
        if self._misses[form] >= MOST_MISSES:
            self._eager_for(form, why)
            if not any(about.startswith(_FAILED) for about in self._notes):  # else the reason has been told
                self._note(f"calls that no code takes run in eager, as one of {in_words(form)}: {why}", "no code takes")
        return why

    def _changed(self, compiled: CompiledCall, error: AotcError) -> None:
        """The module is no longer what this code was loaded for: find out what it is."""
        with self._lock:
            if not any(compiled is each for each in self._compiled):
                return  # another thread has seen it before
            _log.info("aotc.compile: %s has changed: %s", self._name, in_line(error))
            if self._look is not None and not self._look.holds():
                self._look_again()
                return
            former = self._compiled
            self._forget_code()
            self._former, self._began = former, not self._may_change()

    # -- what the module is -------------------------------------------------------------------------------------------

    def _has_changed(self) -> bool:
        """Whether the module may be another than it was when code was last looked for: asked before calls in eager."""
        return (
            self._is_lost or (self._look is not None and not self._look.holds()) or any(map(_holds_again, self._former))
        )

    def _look_again(self) -> None:
        """Take up what is known of the module as it is now; begin anew where it never was so."""
        with self._lock, self._in_cells():
            if not self._is_lost and self._look is not None and self._look.holds():
                if any(map(_holds_again, self._former)):
                    self._compiled, self._former = self._former, []
                    self._choose()
                return
            for name, known in self._aside.items():
                if known["_look"] is not None and known["_look"].holds():
                    self._take_up(name)
                    return
            if self._is_lost:
                return
            by_calls = self._look.by_calls if self._look is not None else frozenset()
            facts = without_changes(facts_of(self.module, self.options.asked), self.by_calls)
            if (name := name_of(facts)) not in self._aside and name != self._name:
                self._put_aside()
                self._begin_afresh()
                if self._may_change():
                    self._begin()
                return
            if name != self._name:
                self._take_up(name)
            self._look = ModuleLook(self.module, by_calls)
            if self._compiled:  # for parts that are others now, though alike
                self._stale()

    def _may_change(self) -> bool:
        """Whether code is looked for again, after a change to what the module never was."""
        self._changes += 1
        if self._changes > MOST_CHANGES:
            self._is_lost, self._place = True, None
            self.builds.place = None
            self._note(f"the module changed {self._changes} times; its calls stay in eager where no code is loaded")
        return not self._is_lost

    def _put_aside(self) -> None:
        if self._look is None:
            return
        self._aside[self._name] = {name: getattr(self, name) for name in _OF_FACTS}
        if self._place is not None and self._made is not None:
            self.builds.others[self._name] = self._place, self._made
        while len(self._aside) > MOST_LOADED:
            self.counter.keep(self._aside.pop(next(iter(self._aside)))["_compiled"])

    def _take_up(self, name: str) -> None:
        if not self._is_lost:
            self._put_aside()
        vars(self).update(self._aside.pop(name))
        self._is_lost = False
        self.builds.others.pop(name, None)
        self.builds.place, self.builds.made = self._place, self._made
        _log.info("aotc.compile: %s again: %s", name, self.state().line())

    # -- what is remembered -------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Mapping[str, Any]]:
        return [part._parameters for part in self.module.modules()]

    def _begin(self) -> None:
        """Find out what the module is, and load the code that there is for it."""
        try:
            with self._in_cells():
                self._begin_with_what_it_is()
        except Exception as error:  # an attribute may be of any kind, and raise anything when it is looked at
            self._place = self.builds.place = None
            self._note(f"the module cannot be looked at: {type(error).__name__}: {error}")

    @contextmanager
    def _in_cells(self) -> Iterator[None]:
        """Within, a file stands for the notebook that defines the module's classes, if one does."""
        from aotc.tools.remembering.cells import module_of_cells

        file, self._no_cells = None, None
        try:
            file = module_of_cells(self.module)
        except (ManifestError, OSError) as error:  # told where the module is to be made again
            self._no_cells = error
        before = cells_file.set(file)
        try:
            yield
        finally:
            cells_file.reset(before)

    def _begin_with_what_it_is(self) -> None:
        self._began, self._place = True, None
        self.builds.place, self.builds.made = None, self._made
        by_calls = self._look.by_calls if self._look is not None else frozenset()
        self._tables = self._parameters()
        self._facts = without_changes(facts_of(self.module, self.options.asked), self.by_calls)
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
                if self.options.build != "never" and (damage := self._place.set_aside_if_damaged()):
                    _log.warning(
                        "aotc.compile: %s; its forms are remembered anew, and %s.damaged has it", damage, self._name
                    )
                if self.options.url and self._place.read() is None:
                    self._pull(self._place)
            self._load()
            counted = {(id(holder), key) for holder, key, _ in self._counting.places} if self._counting else set()
            self._look = ModuleLook(self.module, by_calls | counted)
            place, state = self._place, self.state()
            if place is not None and not state.forms and (before := place.latest_of_class(self._facts)) is not None:
                changed = list(differences(before.facts, self._facts))
                _log.warning("aotc.compile: %s is new: %s", self._name, listed(changed, 5))
        except (AotcError, OSError) as error:
            self._place = self.builds.place = None
            self._note(f"{self.options.store} cannot be used: {error}")
            return
        _log.info("aotc.compile: %s", state.line())
        if not self.is_reported and os.environ.get("AOTC_COMPILE") == "report":
            self.is_reported = True
            write_line(f"aotc.compile: {state.line()}")
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
        self._choose()

    def _choose(self) -> None:
        self._only = self._compiled[0] if len(self._compiled) == 1 and not self._regions else None
        self._runs.clear()
        self._whys.clear()

    def _load_all(self) -> None:
        store = self._store
        memory = self._place.read() if self._place is not None else None
        self._built_then = [kind.built for kind in memory.kinds] if memory else []
        for kind in range(len(memory.kinds)) if memory else itertools.count():
            model = f"{self._name}-{kind + 1}" if kind else self._name
            ref = f"{store}/{model}" if is_registry(store) else model
            if memory is not None and (counters := memory.kinds[kind].counters):
                self._counting = Counting(self.module, counters)
                for name in counters:
                    fact = f"attribute {name}"
                    self.by_calls.setdefault(fact, self._facts.get(fact))
            try:
                compiled = load(ref, self.module, store=None if is_registry(store) else store, on_miss="eager")
            except NotFoundError as error:
                if memory is None:
                    break
                if memory.kinds[kind].built:
                    self.builds.repairs = True
                    self._build_anew(kind, error)
            except BindError as error:
                self._refused(kind, model, memory, error)
            except CorruptError as error:  # all of it can be built again
                if self._place is None or self.options.build == "never":
                    self._note(f"{model} cannot be loaded: {error}")
                    break
                self.builds.repairs = True
                if memory is None:
                    _log.warning("aotc.compile: %s is damaged, and is built anew: %s", model, in_line(error))
                    break
                self._build_anew(kind, error)
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
                    call.on_miss = _refused

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
        elif self.by_calls:
            self._note(
                f"a call in eager has changed {listed([*self.by_calls], 3)}: calls run in eager, and the next run "
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
            self._note_failure(self._place, self._place.model(kind), reason)
            return
        _log.warning("aotc.compile: %s is built anew: %s", self._place.model(kind), in_line(error))
        self._unbuilt(kind)

    def _unbuilt(self, kind: int) -> None:
        assert self._place is not None
        self._place.change(None, lambda memory: setattr(memory.kinds[kind], "built", 0))
        self._built_then[kind] = 0

    def _forget_code(self) -> None:
        self.counter.keep(self._compiled)
        self._only, self._compiled, self._regions, self._former, self._is_stale = None, [], [], [], False
        self._runs.clear()
        self._whys.clear()
        self._misses.clear()

    def _stale(self) -> None:
        """Let the next call load what there is."""
        self._only, self._is_stale = None, True
        self._runs.clear()
        self._whys.clear()

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
                    self._known_kinds = {(*kind.ambient.items(), kind.of_calls) for kind in memory.kinds}
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
                if self._place is None or (made := self._made) is None:
                    return ""
                if not self.builds.repairs:  # else the build restores it first
                    Store.create(self._store)
                memory = self._place.change(msgspec.structs.replace(made, kinds=[]), keep, durable=False)
                if memory is None or number < 0:
                    return ""
                if reason := self._place.failed(number):
                    self._note_failure(self._place, self._place.model(number), reason)
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
        if self._made is None and self._place is not None:
            try:
                self._made = self.builds.made = self._new_memory()
            except AotcError as error:
                self._build_nothing(error)

    def _new_memory(self) -> Memory:
        """How a build makes the module, with no calls yet. Raises ManifestError where that is not known."""
        from aotc.tools.remembering.manifest import dtype_to_cast, made_from

        changed = self._changed_names()
        with self._in_cells():
            if self._no_cells is not None and self.options.factory is None:
                raise self._no_cells
            made = made_from(self.module, self.options.factory, self.options.kwargs, changed)
        size = sum(tensor.nbytes for tensor in plain_state(self.module).values())
        cast = dtype_to_cast(self.module)
        return Memory(
            self._facts, self.options.asked, made.factory, made.kwargs, cast, state_bytes=size, changed=changed
        )

    # -- builds -------------------------------------------------------------------------------------------------------

    def _ended(self, place: Place, status: int) -> None:
        """A build has ended: let the next call load what there is, and tell what failed."""
        with self._lock:
            if place.name != self._name:  # the module has changed meanwhile
                if (known := self._aside.get(place.name)) is not None:
                    known |= {"_only": None, "_is_stale": True, "_runs": {}, "_whys": {}}
                return self.builds.soon()
            if status:
                last = " | ".join(last_lines(place.log, 2))
                self._note(f"the build ended with status {status}; the last lines of {place.log}: {last}")
            self._stale()
            try:
                for model, reason in self.state().failed.items():
                    self._note_failure(place, model, reason)
                memory = place.read()
                if not status and memory is not None and place.unbuilt(memory):
                    self.builds.soon()
            except (AotcError, OSError) as error:
                self._note(f"{place.folder} cannot be read: {error}")
            return None

    def wait(self, timeout: float | None = None) -> bool:
        """Build what has no code yet, wait for that, and load it. Whether all that was seen has code now; and if the
        module is in the mode of these calls, whether that code takes calls like those that were seen."""
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
        is_loaded = not self._is_in_mode or (len(state.models) == len(self._built_then) and self._all_are_taken())
        return 0 < state.forms == state.built and not state.failed and is_loaded

    def _all_are_taken(self) -> bool:
        """Whether the code that is loaded takes calls like those that were seen. Regions take theirs by themselves."""
        if self._regions:
            return True
        refused = {form: why for form, like in self._like.items() if (why := like.refusal(self._compiled))}
        for form, why in refused.items():
            self._note(f"no code takes calls of {in_words(form)}, though it was built for them: {why}")
        return not refused

    # -- looking in ---------------------------------------------------------------------------------------------------

    def _note(self, text: str, about: str = "") -> None:
        """Tell a reason why calls run in eager, once; of several `about` the same, the first."""
        text = in_line(text)
        if (about or text) not in self._notes and len(self._notes) < MOST_NOTES:
            self._notes[about or text] = text
            _log.warning("aotc.compile: %s: %s", self._called(), text)

    def _note_failure(self, place: Place, model: str, reason: str) -> None:
        again = f"to try again, remove {place.folder}/{model}.failed"
        self._note(f"{model} cannot be built, and its calls run in eager: {reason}\n{again}", f"{_FAILED}{model}")

    def _called(self) -> str:
        """The module's name in the store, or as long as there is none its class's."""
        return self._name or type(self.module).__name__

    def state(self) -> CompileState:
        """As `Remembered.explain`."""
        place = self._place
        memory = place.read() if place is not None else None
        kinds = memory.kinds if memory is not None else []
        failed = {place.model(n): why for n in range(len(kinds)) if (why := place.failed(n))} if place else {}
        return CompileState(
            name=self._called(),
            store=self.options.store,
            forms=sum(len(kind.calls) for kind in kinds),
            built=sum(kind.built for kind in kinds),
            building=place is not None and place.is_being_built(),
            models=tuple(compiled.artifact.model for compiled in self._compiled),
            failed=failed,
            notes=tuple(self._notes.values()),
            calls=self.stats(),
        )

    def stats(self) -> CallCounts:
        """As `Remembered.stats`."""
        aside = [call for known in [*self._aside.values()] for call in known["_compiled"]]
        return self.counter.counts([*self._compiled, *aside])


_live: weakref.WeakSet[Remembering] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Begin the builds that have not begun; the process that builds outlives this one."""
    for each in list(_live):
        if each.options.build == "exit":
            each.builds.wait(None)
        else:
            each.builds.start()
        if each.is_reported:
            with suppress(AotcError, OSError):
                write_line(f"aotc.compile: {each.state().line()}")


def _holds_again(call: CompiledCall) -> bool:
    """Whether all that it reads is again what it was at the load."""
    watch: ModuleWatch | None = getattr(call, "_watch", None)
    with suppress(Exception):  # an attribute may be gone; values may be neither equal nor unequal
        return watch is not None and watch._seen.facts.hold()
    return False


def _refused(error: AotcError, /, *args: Any, **kwargs: Any) -> object:
    """The `on_miss` of loaded code: `_checked` runs what it refuses."""
    return _REFUSED


def _has_run(error: Exception) -> bool:
    """Whether code may have begun to run when this was raised: in its launch, or by the evaluator of `aotc.core`."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return CompiledCall.launch.__code__ in frames or frames[-1] is CompiledCall.__call__.__code__


def in_line(said: object) -> str:
    """An error, or another text of several lines, on one line of a log: hints after the rest."""
    return "; ".join(line.strip().removeprefix("- ") for line in str(said).split("\n") if line.strip())
