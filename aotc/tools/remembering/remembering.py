"""The calls of a module that is compiled as it is used: in eager, recorded, or by compiled code when there is some."""

from __future__ import annotations

import atexit
import functools
import traceback
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aotc.errors import AotcError, BindError, GradientError, ManifestError, MissError
from aotc.machine.forks import renew_in_child
from aotc.machine.processes import last_lines
from aotc.runtime.call import CompiledCall
from aotc.tools.remembering.building.while_waiting import write_line
from aotc.tools.remembering.call_counts import CallCounts, in_words
from aotc.tools.remembering.code_loading import REFUSED, UNLOADED
from aotc.tools.remembering.compile_context import FAILED, CompileContext
from aotc.tools.remembering.compile_options import Options
from aotc.tools.remembering.compile_state import CompileState, in_line
from aotc.tools.remembering.forms import CallLike, form_of, records_gradients, taker_of
from aotc.tools.remembering.known_module import KnownModule
from aotc.tools.remembering.memory.call_memory import CallMemory, Lacking
from aotc.tools.remembering.memory.memory import Place
from aotc.tools.remembering.module_changes import ModuleChanges
from aotc.tools.remembering.region_calls import RegionCode

if TYPE_CHECKING:
    from aotc.tools.remembering.memory.kind_index import RememberedCall

MOST_MISSES = 3
"""Misses of one form until its calls are made in eager at once: to explain a miss takes milliseconds."""
MOST_FORMS = 4096
MOST_TRIED = 256
"""Forms of which a call is kept, without values, to try the code that is loaded."""

_UNHELD = "no manifest holds its arguments"
_UNSEEN = "a form that cannot be looked at"
_STRICT = 'wait() for the build, or leave on_miss="error" out to run such calls in eager; stats() has all reasons'


class Remembering:
    """The calls of one module. Many threads may call."""

    def __init__(self, module: nn.Module, method: MethodType | None, options: Options) -> None:
        """`method`: whose calls these are, in the place of the module's own."""
        self.context = CompileContext(module, method, options, self._ended)
        self.module = module
        self._memory = CallMemory(self.context)
        self._module = ModuleChanges(self.context, self._memory)
        _live.add(self)
        renew_in_child(self, lambda each: each.context.renew())

    @property
    def known(self) -> KnownModule:
        """What is known of the module as it is."""
        return self.context.known

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if "forward" in vars(self.module) and self.context.own is self.module:
            from aotc.tools.remembering.making.wrapped_forward import wrapped_forward

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
            not self.context.options.train
            and torch.is_grad_enabled()
            and records_gradients(self.known.tables or self.context.parameters(), args, kwargs)
        ):
            return self._with_gradients
        if (only := self.known.only) is not None:
            return functools.partial(self._checked, only)
        form = form_of(args, kwargs, self.context.device)
        if (run := self.known.runs.get(form)) is not None:
            return run
        if self._module.began and self._module.has_changed():
            self._module.look_again()
            if (only := self.known.only) is not None:
                return functools.partial(self._checked, only)
            if (run := self.known.runs.get(form)) is not None:
                return run
        if lost := self._module.lost:
            return functools.partial(self._in_eager, form, lost)
        if (why := self.known.whys.get(form)) is not None:
            return functools.partial(self._watched, form, why)
        if beyond := self._memory.beyond(args, kwargs):
            return functools.partial(self._watched, beyond, beyond)
        return self._first(form, args, kwargs)

    @property
    def _is_in_mode(self) -> bool:
        """Whether the module is in the mode whose calls are compiled: training, or not."""
        return self.module.training is self.context.options.train

    def in_eager(self, why: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call in eager of which the caller knows why no code can run it."""
        self.context.note(f"calls run in eager: {why}")
        return self._in_eager(self._form(args, kwargs), why, *args, **kwargs)

    def _in_eager(self, form: Hashable, why: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module, as all calls do that no code runs. Raises MissError instead, if that is asked."""
        self.context.counter.ran_eager("train" if self.module.training else "inference", form, why)
        if self.context.options.on_miss == "error":
            raise MissError(
                f"{self.context.called()}: a call of {in_words(form)} would run in eager: {why}", hint=_STRICT
            )
        return self.known.eager(*args, **kwargs)

    def _watched(self, form: Hashable, why: str, /, *args: Any, **kwargs: Any) -> Any:
        """As `_in_eager`, of a module that was just looked at: so the call made what differs after it. Once calls of a
        form have often changed nothing, the module is not looked at after them."""
        look = self.known.look
        result = self._in_eager(form, why, *args, **kwargs)
        if look is not None and self._module.is_looked_at_after(look, form) and look is self.known.look:
            if look.holds():
                look.has_held_after(form)
            else:
                with self.context.lock:
                    self._module.note_changes(look)
        return result

    def _out_of_mode(self, /, *args: Any, **kwargs: Any) -> Any:
        self.context.note(
            "calls in training mode run in eager: model.eval() for inference, or aotc.compile(model, train=True)"
        )
        return self._in_eager("any form", "the module is in training mode, and train=True is not set", *args, **kwargs)

    def _with_gradients(self, /, *args: Any, **kwargs: Any) -> Any:
        self.context.note(
            "calls that record gradients run in eager: call it within torch.no_grad() or torch.inference_mode()"
        )
        why = "the call records gradients, outside of torch.no_grad()"
        return self.context.gate.run_inside(lambda: self._in_eager("any form", why, *args, **kwargs))

    def _unseen(self, error: Exception) -> str:
        """Note that a call cannot be looked at, and why; that in words."""
        why = f"it cannot be looked at: {type(error).__name__}: {in_line(error)[:200]}"
        self.context.note(f"a call runs in eager: {why}", f"unseen {type(error).__name__}")
        return why

    def _checked(self, compiled: CompiledCall, /, *args: Any, **kwargs: Any) -> Any:
        try:
            result = compiled(*args, **kwargs)
        except (BindError, GradientError) as error:  # found before any of it ran
            self._module.changed(compiled, error)
            run = self._run_of(args, kwargs)
            code = run.args[0] if isinstance(run, functools.partial) and run.func == self._checked else None
            if code is None:
                return run(*args, **kwargs)
            if code is not compiled:  # of the module as it is now
                with suppress(BindError, GradientError):
                    if (result := code(*args, **kwargs)) is not REFUSED:
                        if self.known.counting is not None:
                            self.known.counting.add()
                        return result
            why = f"the module has changed: {in_line(error)}"
        except Exception as error:
            if _has_run(error):
                raise
            why = self._unseen(error)
        else:
            if result is not REFUSED:
                if self.known.counting is not None:
                    self.known.counting.add()
                return result
            self.known.only = None
            if self._module.has_changed():  # to another dtype, say, as the arguments have
                self._module.look_again()
                return self._run_of(args, kwargs)(*args, **kwargs)
            return self._uncovered(None, *args, **kwargs)
        return self._in_eager(self._form(args, kwargs), why, *args, **kwargs)

    def _form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        """The form of a call, whatever its arguments are."""
        try:
            hash(form := form_of(args, kwargs, self.context.device))
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
            self._module.changed(code.call, error)
            return self._in_eager(form, f"the module has changed: {in_line(error)}", *args, **kwargs), False
        if run.error is not None:
            self._module.changed(code.call, run.error)
        is_covered = not run.missed and run.error is None
        if is_covered:
            self.context.counter.ran_compiled(form)
        else:
            why = (
                f"the module has changed: {in_line(run.error)}" if run.error else "no code takes the calls of a region"
            )
            self.context.counter.ran_eager("train" if self.module.training else "inference", form, why)
        return result, is_covered

    def _first(self, form: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """What runs calls of a form that came for the first time, since code was loaded."""
        with self.context.lock:
            if not self._module.began or self.known.is_stale:
                self._module.begin()
            if len(self.known.runs) + len(self.known.whys) >= MOST_FORMS:
                self.known.runs.clear()
                self.known.whys.clear()
            for compiled in self.known.compiled if not self.known.regions else ():
                with suppress(TypeError):  # the arguments are those of another kind of calls
                    if compiled.explain(*args, **kwargs).kind != "miss":
                        run = self.known.runs[form] = functools.partial(self._checked, compiled)
                        return run
            return functools.partial(self._uncovered, form)

    def _uncovered(self, form: Hashable, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module for a call that no code is known to take; remember the call if it succeeds, and see that code
        comes. `form` is None where it is not known yet."""
        form = self._form(args, kwargs) if form is None else form
        builds = self.known.place is not None and self.context.options.build != "never"
        if not builds and not self.known.regions:
            return self._in_eager(form, self._refused_again(form, args, kwargs), *args, **kwargs)
        if self.context.device == "cuda" and torch.cuda.is_current_stream_capturing():  # which to look at values ends
            return self._in_eager(form, "a CUDA graph is being captured, and its form is not known", *args, **kwargs)
        try:
            seen = self._memory.seen(args, kwargs)
            if builds:
                with self.context.lock:
                    self._memory.find_made()
            code = self.known.regions_for(self._memory.number_of(seen))
        except ManifestError as error:  # looked at before the module may write to it
            self.context.note(f"calls with what no manifest holds run in eager: {in_line(error)}")
            return self._eager_for(form, f"{_UNHELD}: {in_line(error)}")(*args, **kwargs)
        except Exception as error:  # eager may take it
            return self._eager_for(form, self._unseen(error))(*args, **kwargs)
        if self.context.options.fullgraph and (reason := self._memory.failure_of(seen)):
            said = f"{self.context.called()}: fullgraph=True, and a call of {in_words(form)} cannot be compiled whole"
            hint = "leave fullgraph out: its repeated submodules are compiled, the rest is eager"
            raise MissError(f"{said}: {reason}", hint=hint)
        if self.context.options.on_miss == "error" and builds and code is None:
            return self._built_or_refused(form, seen, args, kwargs)
        if code is not None:
            result, is_covered = self._ran_by_regions(code, form, args, kwargs)
            if is_covered:
                self.known.runs[form] = functools.partial(self._by_regions, code, form)
                return result
        else:
            result = self._watched(form, "it is new", *args, **kwargs)
        try:
            if not builds:
                self._refused_again(form, args, kwargs)
            elif self._keep(form, seen, args, kwargs) == "build" and self.context.options.build == "now":
                self.wait()
        except Exception as error:  # eager has run: its result is given, whatever comes of the code
            self._eager_for(form, self._unseen(error))
        return result

    def _built_or_refused(
        self, form: Hashable, seen: RememberedCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a call that may not run in eager by code that is built now, if that may be; else MissError is raised."""
        lacking = self._keep(form, seen, args, kwargs)
        if lacking == "load" or (lacking == "build" and self.context.options.build == "now" and self.wait()):
            with self.context.lock:
                self._module.begin()
            for compiled in self.known.compiled if not self.known.regions else ():
                if compiled.explain(*args, **kwargs).kind != "miss":
                    return self._checked(compiled, *args, **kwargs)
            if (code := self.known.regions_for(self._memory.number_of(seen))) is not None:
                return self._ran_by_regions(code, form, args, kwargs)[0]
        return self._in_eager(form, self._why_not(lacking, args, kwargs), *args, **kwargs)

    def _keep(self, form: Hashable, seen: RememberedCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Lacking:
        """Remember a call, and see that code comes; what its form lacks."""
        with self.context.lock:
            if len(self.known.like) < MOST_TRIED and form != _UNSEEN:
                self.known.like.setdefault(form, CallLike(args, kwargs, self.context.device))
            lacking = self._memory.remember(seen)
            if lacking == "load":
                self.known.let_load()
            elif lacking == "build":
                if not self.known.is_stale:
                    self._eager_for(form, self._why_not("build", args, kwargs))
                self.context.builds.soon()
            else:
                self._refused_again(form, args, kwargs, self._memory.failure_of(seen))
        return lacking

    def _eager_for(self, form: Hashable, why: str) -> Callable[..., Any]:
        """Let calls of this form run in eager, and give what runs them."""
        if form != _UNSEEN:
            self.known.whys[form] = why
        return functools.partial(self._watched, form, why)

    def _why_not(self, lacking: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Why no code runs a call, in words."""
        if lacking == "build":
            if limit := self.context.builds.limit_reached(self._memory.builds_so_far()):
                return limit
            when = {"exit": "at the program's end", "now": "now"}.get(self.context.options.build, "by another process")
            is_late = self.context.builds.uses_gpu and not self.context.options.gpu
            return f"code for this form is built {'at the end of the program' if is_late else when}"
        if lacking == "load":
            return "its code has just been built, and is loaded at the next call"
        if self.known.compiled:
            return f"no code takes it: {taker_of(self.known.compiled, args, kwargs).said}"
        if self.context.options.build == "never":
            try:
                self._memory.seen(args, kwargs)
            except ManifestError as error:
                return f"{_UNHELD}: {in_line(error)}"
            except Exception as error:  # eager may take it
                return self._unseen(error)
            none = f'{self.context.options.store} has no code for this module, and build="never"'
            return self.known.notes.get(UNLOADED, none)
        return next(reversed(self.known.notes.values()), "there is no code for it")

    def _refused_again(self, form: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any], failure: str = "") -> str:
        """Why a call of a form that gets no code runs in eager. To ask all code, and to explain a miss, takes
        milliseconds: so calls of a form that came often do so at once."""
        why = f"its code cannot be built: {failure}" if failure else self._why_not("", args, kwargs)
        if len(self.known.misses) >= MOST_FORMS:
            self.known.misses.clear()
        self.known.misses[form] += 1
        if self.known.misses[form] >= MOST_MISSES:
            self._eager_for(form, why)
            if not any(about.startswith(FAILED) for about in self.known.notes):  # else the reason has been told
                self.context.note(
                    f"calls that no code takes run in eager, as one of {in_words(form)}: {why}", "no code takes"
                )
        return why

    def _ended(self, place: Place, status: int) -> None:
        """A build has ended: let the next call load what there is, and tell what failed."""
        with self.context.lock:
            if place.name != self.known.name:  # the module has changed meanwhile
                if (known := self.context.aside.get(place.name)) is not None:
                    known.let_load()
                return self.context.builds.soon()
            if status:
                last = " | ".join(last_lines(place.log, 2))
                self.context.note(f"the build ended with status {status}; the last lines of {place.log}: {last}")
            self.known.let_load()
            try:
                for model, reason in self.context.state().failed.items():
                    self.context.note_failure(place, model, reason)
                memory = place.read()
                if not status and memory is not None and place.unbuilt(memory):
                    self.context.builds.soon()
            except (AotcError, OSError) as error:
                self.context.note(f"{place.folder} cannot be read: {error}")
            return None

    def wait(self, timeout: float | None = None) -> bool:
        """Build what has no code yet, wait for that, and load it. Whether all that was seen has code now; and if the
        module is in the mode of these calls, whether that code takes calls like those that were seen."""
        with self.context.lock:
            if not self._module.began and self._is_in_mode:
                self._module.begin()
        if not self.context.builds.wait(timeout):
            return False
        with self.context.lock:
            if self._is_in_mode:
                self._module.begin()
            else:
                self.known.let_load()
        state = self.context.state()
        is_loaded = not self._is_in_mode or (len(state.models) == len(self.known.built_then) and self._all_are_taken())
        return 0 < state.forms == state.built and not state.failed and is_loaded

    def _all_are_taken(self) -> bool:
        """Whether the code that is loaded takes calls like those that were seen. Regions take theirs by themselves."""
        if self.known.regions:
            return True
        takers = {form: like.taker(self.known.compiled) for form, like in self.known.like.items()}
        for form, taker in takers.items():
            if taker.call is None:
                said = f"no code takes calls of {in_words(form)}, though it was built for them: {taker.said}"
                self.context.note(said)
        return all(taker.call is not None for taker in takers.values())

    def state(self) -> CompileState:
        """As `Remembered.explain`."""
        return self.context.state()

    def stats(self) -> CallCounts:
        """As `Remembered.stats`."""
        return self.context.stats()


_live: weakref.WeakSet[Remembering] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Begin the builds that have not begun; the process that builds outlives this one."""
    for each in list(_live):
        if each.context.options.build == "exit":
            each.context.builds.wait(None)
        else:
            each.context.builds.start()
        if each._module.is_reported:
            with suppress(AotcError, OSError):
                write_line(f"aotc.compile: {each.state().line()}")


def _has_run(error: Exception) -> bool:
    """Whether code may have begun to run when this was raised: in its launch, or by the evaluator of `aotc.core`."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return CompiledCall.launch.__code__ in frames or frames[-1] is CompiledCall.__call__.__code__
