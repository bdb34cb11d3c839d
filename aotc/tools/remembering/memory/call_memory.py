"""What calls are remembered, of the module as it is: for these forms code is built."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from aotc.digest import sha256_json
from aotc.errors import AotcError
from aotc.reads.modes import ambient_here
from aotc.reads.tensors import plain_state
from aotc.tools.remembering.compile_context import CompileContext
from aotc.tools.remembering.compile_state import in_line
from aotc.tools.remembering.known_module import KnownModule
from aotc.tools.remembering.memory.memory import Memory, Place

if TYPE_CHECKING:
    from aotc.tools.remembering.memory.kind_index import KindIndex, RememberedCall

WRITES_EVERY, WRITES_SHARE = 1.0, 100.0
"""Seconds until calls are written again; and how many times as long as writing them took."""

Lacking = Literal["", "build", "load"]
"""What a form lacks: code, code that is loaded, or nothing, where code cannot be built, or refuses the call."""


class CallMemory:
    """Keeps the calls of one module. Many threads may call."""

    def __init__(self, context: CompileContext) -> None:
        self._context = context
        self._write_at = 0.0
        context.write = self.write

    def seen(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RememberedCall:
        """A call, as it is remembered. Raises ManifestError for what no manifest holds, and what arguments raise."""
        from aotc.tools.remembering.memory.kind_index import remembered_call
        from aotc.tools.remembering.memory.remembered_calls import seen_with_caches

        context = self._context
        seen = seen_with_caches(context.module, context.method, args, kwargs, gradients=context.options.train)
        return remembered_call(seen, ambient_here(context.device))

    def remember(self, seen: RememberedCall) -> Lacking:
        """Keep a call that the loaded code does not take, and give what its form lacks."""
        context = self._context
        with context.lock:
            known = context.known
            try:
                if (place := known.place) is None or known.made is None:
                    return ""
                index = self._index_of(known, place)
                if full := index.add(seen):
                    context.note(full)
                if time.monotonic() >= self._write_at:
                    index = self._written(known, place)
                if (number := index.numbers.get(seen.kind)) is None:
                    return ""
                if reason := index.failures[number]:
                    context.note_failure(place, place.model(number), reason)
                    return ""
                then = known.built_then[number] if number < len(known.built_then) else 0
                return "build" if index.has_unbuilt(number) else "load" if index.built[number] > then else ""
            except (AotcError, OSError) as error:
                self.build_nothing(error)
                return ""

    def _index_of(self, known: KnownModule, place: Place) -> KindIndex:
        from aotc.tools.remembering.memory.kind_index import KindIndex

        if known.index is None:
            known.index = KindIndex(place.read(), place.failed)
        return known.index

    def _written(self, known: KnownModule, place: Place) -> KindIndex:
        """Write the calls that came since the last time, and read those of other processes. It takes milliseconds, and
        the more the more calls there are: so it is done for few of them."""
        from aotc.store.layout.store import Store
        from aotc.tools.remembering.memory.kind_index import KindIndex, keep_calls

        began, calls = time.monotonic(), known.index.unwritten if known.index is not None else []
        if known.made is not None and calls:
            if not self._context.builds.repairs:  # else the build restores it first
                Store.create(self._context.store)
            new = msgspec.structs.replace(known.made, kinds=[])
            memory = place.change(new, lambda memory: keep_calls(memory, calls), durable=False)
            known.index = KindIndex(memory, place.failed)
        now = time.monotonic()
        self._write_at = now + max(WRITES_EVERY, WRITES_SHARE * (now - began))
        return self._index_of(known, place)

    def write(self) -> None:
        """Write all calls that are not written yet."""
        context = self._context
        with context.lock:
            for known in (context.known, *context.aside.values()):
                if known.place is not None and known.index is not None and known.index.unwritten:
                    try:
                        self._written(known, known.place)
                    except (AotcError, OSError) as error:
                        self.build_nothing(error)

    def number_of(self, seen: RememberedCall) -> int | None:
        """The number of a call's kind; None where it is a new one. Raises AotcError, OSError."""
        known = self._context.known
        return self._index_of(known, known.place).numbers.get(seen.kind) if known.place is not None else None

    def failure_of(self, seen: RememberedCall) -> str:
        """Why calls of this kind have no code; "" where nothing has failed."""
        known = self._context.known
        with suppress(AotcError, OSError):
            if known.place is not None and (number := self.number_of(seen)) is not None:
                return in_line(self._index_of(known, known.place).failures[number])
        return ""

    @functools.cached_property
    def _usual(self) -> set[object]:
        """The plain values that are defaults of parameters: arguments that have these are as if they were not given."""
        called = self._context.method or self._context.module.forward
        defaults = (parameter.default for parameter in inspect.signature(called).parameters.values())
        return {value for value in defaults if isinstance(value, bool | int | float | str)}

    def builds_so_far(self) -> int:
        """How many builds of the module as it is were begun, as far as this process knows."""
        index = self._context.known.index
        return index.builds if index is not None else 0

    def beyond(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Why no code is built for a call that is of none of the kinds that are remembered, where there are as many of
        them as may be; "" where it may be built."""
        context = self._context
        if (index := context.known.index) is None or not (index.is_full or index.has_varying):
            return ""
        from aotc.tools.recording.seen_calls import bound_arguments, kind_in, without_extents
        from aotc.tools.remembering.memory.kind_index import beyond_kinds, constants_of
        from aotc.tools.remembering.memory.varying_floats import argument_varies

        path = ""
        try:
            given = constants_of([*args, *kwargs.values()])
            if not index.is_full or all(each in index.constants or each[1] in self._usual for each in given):
                bound = bound_arguments(context.module, args, kwargs, context.method)
                gradients = context.options.train and torch.is_grad_enabled()
                seen = {name: without_extents(value, gradients) for name, value in bound.items()}
                if kind_in(seen, ambient_here(context.device)) in index.numbers:
                    return ""
                path = index.varying(seen)
        except Exception:  # the look at the call to be remembered tells of it
            return ""
        if not path and not index.is_full:
            return ""
        context.note(why := argument_varies(path) if path else beyond_kinds())
        return why

    def build_nothing(self, why: Exception) -> None:
        self._context.note(f"nothing is built: {why}")
        self._context.put_place(None)

    def find_made(self) -> None:
        """Find out how a build makes the module, before a call may change it, if that was not needed so far."""
        known = self._context.known
        if known.made is None and known.place is not None:
            try:
                known.made = self._context.builds.made = self.new_memory()
            except AotcError as error:
                self.build_nothing(error)

    def new_memory(self) -> Memory:
        """How a build makes the module, with no calls yet. Raises ManifestError where that is not known."""
        from aotc.tools.recording.manifest_text import dtype_to_cast
        from aotc.tools.remembering.making.made_from import made_from

        module, options, changed = self._context.module, self._context.options, self._context.changed_names()
        with self._context.in_cells():
            if self._context.no_cells is not None and options.factory is None:
                raise self._context.no_cells
            facts = {name: value for name, value in self._context.known.facts.items() if name != "option train"}
            if (made := self._context.makers.get(key := sha256_json(facts))) is None:
                made = made_from(module, options.factory, options.kwargs, changed)
                self._context.makers[key] = made
        dtype, others = dtype_to_cast(module)
        return Memory(
            self._context.known.facts,
            options.asked,
            made.factory,
            made.kwargs,
            "" if others else dtype,
            state_bytes=sum(tensor.nbytes for tensor in plain_state(module).values()),
            changed=changed,
        )
