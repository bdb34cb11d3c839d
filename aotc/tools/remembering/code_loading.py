"""How code that a store has for a module as it is, is loaded; what cannot be is built anew, or told."""

from __future__ import annotations

import functools
import itertools
import logging
from pathlib import Path
from typing import Any

from aotc.amounts import listed
from aotc.errors import AotcError, BindError, CorruptError, NotFoundError
from aotc.records import Artifact
from aotc.runtime.call import CompiledCall
from aotc.runtime.load import load
from aotc.store.reference import is_registry
from aotc.tools.remembering.building.counting_attributes import Counting
from aotc.tools.remembering.compile_context import CompileContext
from aotc.tools.remembering.compile_state import in_line
from aotc.tools.remembering.memory.memory import Memory
from aotc.tools.remembering.region_calls import RegionCode, in_eager, parts_free

_log = logging.getLogger("aotc")

REFUSED = object()
"""What loaded code gives for a call that it does not take."""
UNLOADED = "unloaded"
"""What the note is about that says why code that the store has is not loaded."""


def _refused(error: AotcError, /, *args: Any, **kwargs: Any) -> object:
    """The `on_miss` of loaded code."""
    return REFUSED


class CodeLoading:
    """Loads the code for one module."""

    def __init__(self, context: CompileContext) -> None:
        self._context = context

    def load(self) -> None:
        """Load all code that there is for the module as it is."""
        context, known = self._context, self._context.known
        context.forget_code()
        if context.options.build != "never" and not (Path(context.store) / "oci-layout").exists():
            known.built_then = []
            return  # the first call that is remembered makes the store
        with parts_free(context.module):
            context.gate.run_alone(self._load_all)
        for code in known.regions:
            code.put()
            known.eager = functools.partial(in_eager, context.own)
        known.choose()

    def _load_all(self) -> None:
        context, known, store = self._context, self._context.known, self._context.store
        memory = known.place.read() if known.place is not None else None
        known.built_then = [kind.built for kind in memory.kinds] if memory else []
        for kind in range(len(memory.kinds)) if memory else itertools.count():
            model = f"{known.name}-{kind + 1}" if kind else known.name
            ref = f"{store}/{model}" if is_registry(store) else model
            if memory is not None and (counters := memory.kinds[kind].counters):
                known.counting = Counting(context.module, counters)
                for name in counters:
                    fact = f"attribute {name}"
                    context.by_calls.setdefault(fact, known.facts.get(fact))
            try:
                compiled = load(ref, context.module, store=None if is_registry(store) else store, on_miss="eager")
            except NotFoundError as error:
                if memory is None:
                    break
                if memory.kinds[kind].built:
                    context.builds.repairs = True
                    self._build_anew(kind, error)
            except BindError as error:
                self._refused(kind, model, memory, error)
            except CorruptError as error:  # all of it can be built again
                if known.place is None or context.options.build == "never":
                    context.note(f"{model} cannot be loaded: {error}", UNLOADED)
                    break
                context.builds.repairs = True
                if memory is None:
                    _log.warning("aotc.compile: %s is damaged, and is built anew: %s", model, in_line(error))
                    break
                self._build_anew(kind, error)
            except AotcError as error:
                context.note(f"{model} cannot be loaded: {error}", UNLOADED)
                break
            else:
                call: CompiledCall = getattr(compiled, context.options.method or "forward")
                known.compiled.append(call)
                if compiled.artifact.regions:
                    known.regions.append(RegionCode(call, kind))
                    self._note_regions(compiled.artifact, memory)
                else:
                    call.on_miss = _refused

    def _note_regions(self, artifact: Artifact, memory: Memory | None) -> None:
        """Log that a model is compiled by regions, where `regions` was not given."""
        if memory is not None and self._context.options.regions is None:
            parts = listed([region.name for region in artifact.regions], 3)
            self._context.note(
                f"{artifact.model} cannot be captured whole: of it, these regions and their like have code: {parts}"
            )

    def _refused(self, kind: int, model: str, memory: Memory | None, error: BindError) -> None:
        """Code that is there was built from another module, though by the same name: the factory makes another one now,
        say. It is built anew, but not if it was built just now."""
        context, known = self._context, self._context.known
        if memory is None or known.place is None or context.options.build == "never":
            context.note(f"{model} is not for this module: {error}", UNLOADED)
        elif context.by_calls:
            context.note(
                f"a call in eager has changed {listed([*context.by_calls], 3)}: calls run in eager, and the next run "
                f"loads {model}; keep in a buffer what forward changes. {error}"
            )
        elif known.name in context.builds.own:
            known.place.fail(kind, f"what the factory makes is another module: {error}")
            known.unbuilt(kind)
            context.note(f"{model} was built from another module: {error}")
        else:
            self._build_anew(kind, error)

    def _build_anew(self, kind: int, error: AotcError) -> None:
        place = self._context.known.place
        if place is None or self._context.options.build == "never":
            return
        model = place.model(kind)
        if reason := place.failed(kind):
            self._context.note_failure(place, model, reason)
            return
        _log.warning("aotc.compile: %s is built anew: %s", model, in_line(error))
        self._context.known.unbuilt(kind)
