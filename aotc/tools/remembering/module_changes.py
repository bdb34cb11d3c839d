"""Whether a module is still what it was when it was looked at, and what is known of it as it is now."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable
from contextlib import suppress

import msgspec

from aotc.amounts import listed
from aotc.errors import AotcError
from aotc.reads.module_identity import IdentityFacts, ModuleIdentity
from aotc.reads.watch import ModuleWatch
from aotc.runtime.call import CompiledCall
from aotc.store.reference import is_remote
from aotc.tools.remembering.building.while_waiting import write_line
from aotc.tools.remembering.code_loading import CodeLoading
from aotc.tools.remembering.compile_context import CompileContext
from aotc.tools.remembering.compile_state import in_line
from aotc.tools.remembering.known_module import KnownModule
from aotc.tools.remembering.memory.call_memory import CallMemory
from aotc.tools.remembering.memory.identity import differences, facts_of, name_of, without_changes
from aotc.tools.remembering.memory.memory import Place, remembered_in
from aotc.tools.remembering.memory.varying_floats import attribute_varies, varying_attribute
from aotc.tools.remembering.module_look import ModuleLook

_log = logging.getLogger("aotc")

MOST_CHANGES = 8
"""Changes of a module to what it never was, as to another dtype, after which only code that is loaded runs."""
LOOKS_AFTER, TIMES_MORE = 1, 4
"""The module is looked at after so many calls of a form, to see what they change; and after so many times as many once
it has changed. A call that changes it now and then is found so; till then that is taken for a change of the program."""
MOST_LOADED = 8
"""Sets of facts whose code stays loaded: of a base model and of each adapter, say."""


class ModuleChanges:
    """Finds out what one module is: at its first call, and after each change."""

    def __init__(self, context: CompileContext, memory: CallMemory) -> None:
        self._context, self._memory, self._loading = context, memory, CodeLoading(context)
        self.began = False
        self.lost = ""
        """Why calls stay in eager, as the module was changed too often; "" where it was not."""
        self.is_reported = False
        """Whether `AOTC_COMPILE=report` has told what there is at the start."""
        self._retry = context.options.retry
        self._changes, self._looks_after = 0, LOOKS_AFTER

    @property
    def is_lost(self) -> bool:
        return bool(self.lost)

    def begin(self) -> None:
        """Find out what the module is, and load the code that there is for it."""
        try:
            with self._context.in_cells():
                self._begin_with_what_it_is()
        except Exception as error:  # an attribute may be of any kind, and raise anything when it is looked at
            self._context.put_place(None)
            self._context.note(f"the module cannot be looked at: {type(error).__name__}: {error}")

    def _begin_with_what_it_is(self) -> None:
        context, known, options = self._context, self._context.known, self._context.options
        self._memory.write()
        self.began, known.index = True, None
        context.put_place(None)
        context.builds.made = known.made
        by_calls = known.look.by_calls if known.look is not None else frozenset()
        known.tables = context.parameters()
        known.facts = without_changes(facts_of(context.module, options.asked), context.by_calls)
        known.name = name_of(known.facts)
        context.device = "cuda" if known.facts["target"].startswith("cuda:") else "cpu"
        context.builds.uses_gpu = context.device == "cuda"
        try:
            self._find_place(known)
            self._loading.load()
            counted = {(id(holder), key) for holder, key, _ in known.counting.places} if known.counting else set()
            known.look = ModuleLook(context.module, by_calls | counted)
            place, state = known.place, context.state()
            if place is not None and not state.forms and (before := place.latest_of_class(known.facts)) is not None:
                changed = list(differences(before.facts, known.facts))
                _log.warning("aotc.compile: %s is new: %s", known.name, listed(changed, 5))
        except (AotcError, OSError) as error:
            context.put_place(None)
            context.note(f"{options.store} cannot be used: {error}")
            return
        _log.info("aotc.compile: %s", state.line())
        if not self.is_reported and os.environ.get("AOTC_COMPILE") == "report":
            self.is_reported = True
            write_line(f"aotc.compile: {state.line()}")
        if place is None or options.build == "never":
            return
        try:
            memory = place.read()
            if memory is None or context.builds.is_due(place, memory):
                self._memory.find_made()
            if context.builds.is_due(place, memory):
                context.builds.soon()
        except (AotcError, OSError) as error:
            self._memory.build_nothing(error)

    def _find_place(self, known: KnownModule) -> None:
        """Find the files of what is remembered, in a store's folder. Raises AotcError, OSError."""
        context, options = self._context, self._context.options
        if options.url:
            from aotc.tools.remembering.memory.remote_memory import copy_of

            context.store = str(copy_of(options.url))
        if is_remote(context.store):
            return
        place = Place(remembered_in(context.store), known.name)
        context.put_place(place)
        if self._retry:
            place.forget_failures()
            self._retry = False
        if options.build != "never" and (damage := place.set_aside_if_damaged()):
            _log.warning("aotc.compile: %s; its forms are remembered anew, and %s.damaged has it", damage, known.name)
        if options.url and place.read() is None:
            self._pull(place)

    def _pull(self, place: Place) -> None:
        """Bring what other machines have built to this one."""
        from aotc.tools.remembering.memory.remote_memory import LOAD_ATTEMPTS, RemoteMemory

        url = self._context.options.url
        try:
            RemoteMemory(url, place, attempts=LOAD_ATTEMPTS).pull(self._memory.new_memory)
        except (AotcError, OSError) as error:
            self._context.note(f"{url} cannot be read: {error}")

    def has_changed(self) -> bool:
        """Whether the module may be another than it was when code was last looked for: asked before calls in eager."""
        known = self._context.known
        return (
            self.is_lost or (known.look is not None and not known.look.holds()) or any(map(_holds_again, known.former))
        )

    def is_looked_at_after(self, look: ModuleLook, form: Hashable) -> bool:
        """Whether the module is looked at after a call of this form, too: to tell what calls change from the rest."""
        return look.held_after.get(form, 0) < self._looks_after

    def look_again(self) -> None:
        """Take up what is known of the module as it is now; begin anew where it never was so."""
        context = self._context
        with context.lock, context.in_cells():
            known = context.known
            if not self.is_lost and known.look is not None and known.look.holds():
                if any(map(_holds_again, known.former)):
                    known.compiled, known.former = known.former, []
                    known.choose()
                return
            for name, other in context.aside.items():
                if other.look is not None and other.look.holds():
                    self._take_up(name)
                    return
            if self.is_lost:
                return
            by_calls = known.look.by_calls if known.look is not None else frozenset()
            facts = without_changes(facts_of(context.module, context.options.asked), context.by_calls)
            if (name := name_of(facts)) not in context.aside and name != known.name:
                self._put_aside()
                context.known = KnownModule(context.own)
                if self._may_change(facts):
                    self.begin()
                return
            if name != known.name:
                self._take_up(name)
            context.known.look = ModuleLook(context.module, by_calls)
            if context.known.compiled:  # for parts that are others now, though alike
                context.known.let_load()

    def _may_change(self, facts: IdentityFacts) -> bool:
        """Whether code is looked for again, after a change to what the module never was."""
        self._changes += 1
        self._looks_after *= TIMES_MORE
        if path := varying_attribute(facts, (other.facts for other in self._context.aside.values())):
            self.lost = attribute_varies(path)
            self._context.note(self.lost)
        elif self._changes > MOST_CHANGES:
            self.lost = f"the module changed {self._changes} times"
            self._context.note(f"{self.lost}; its calls stay in eager where no code is loaded")
        if self.is_lost:
            self._context.put_place(None)
        return not self.is_lost

    def _put_aside(self) -> None:
        context, known = self._context, self._context.known
        if known.look is None:
            return
        context.aside[known.name] = known
        if known.place is not None and known.made is not None:
            context.builds.others[known.name] = known.place, known.made
        while len(context.aside) > MOST_LOADED:
            context.counter.keep(context.aside.pop(next(iter(context.aside))).compiled)

    def _take_up(self, name: str) -> None:
        context = self._context
        if not self.is_lost:
            self._put_aside()
        context.known = context.aside.pop(name)
        self.lost = ""
        context.builds.others.pop(name, None)
        context.builds.place, context.builds.made = context.known.place, context.known.made
        _log.info("aotc.compile: %s again: %s", name, context.state().line())

    def changed(self, compiled: CompiledCall, error: AotcError) -> None:
        """The module is no longer what this code was loaded for: find out what it is."""
        context = self._context
        with context.lock:
            known = context.known
            if not any(compiled is each for each in known.compiled):
                return  # another thread has seen it before
            _log.info("aotc.compile: %s has changed: %s", known.name, in_line(error))
            if known.look is not None and not known.look.holds():
                self.look_again()
                return
            former = known.compiled
            context.forget_code()
            known.former, self.began = former, not self._may_change(known.facts)

    def note_changes(self, look: ModuleLook) -> None:
        """Keep the attributes as they were before a call, of those that the call has changed."""
        context, known = self._context, self._context.known
        known.look, now = look.with_changes(), ModuleIdentity(context.module).attribute_facts()
        before = {name: value for name, value in known.facts.items() if name.startswith("attribute ")}
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                context.by_calls.setdefault(name, before.get(name))
        if known.made is not None:
            known.made = context.builds.made = msgspec.structs.replace(known.made, changed=context.changed_names())


def _holds_again(call: CompiledCall) -> bool:
    """Whether all that it reads is again what it was at the load."""
    watch: ModuleWatch | None = getattr(call, "_watch", None)
    with suppress(Exception):  # an attribute may be gone; values may be neither equal nor unequal
        return watch is not None and watch._seen.facts.hold()
    return False
