"""What calls are remembered, of the module as it is: for these forms code is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch

from aotc.errors import AotcError
from aotc.reads.tensors import plain_state
from aotc.tools.remembering.compile_context import CompileContext
from aotc.tools.remembering.forms import ambient_here
from aotc.tools.remembering.memory import MOST_CALLS, MOST_KINDS, Kind, Memory

Lacking = Literal["", "build", "load"]
"""What a form lacks: code, code that is loaded, or nothing, where code cannot be built, or refuses the call."""


class CallMemory:
    """Keeps the calls of one module. Many threads may call."""

    def __init__(self, context: CompileContext) -> None:
        self._context = context

    def seen(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call, as it is remembered. Raises ManifestError for what no manifest holds, and what arguments raise."""
        from aotc.tools.remembering.remembered_calls import as_json, seen_call

        context = self._context
        seen = seen_call(context.module, context.own, args, kwargs, gradients=context.options.train)
        return {name: as_json(value) for name, value in seen.items()}

    def remember(self, seen: dict[str, Any]) -> Lacking:
        """Keep a call that the loaded code does not take, and give what its form lacks."""
        from aotc.store.layout.store import Store

        context = self._context
        ambient = ambient_here(context.device)
        number = -1

        def keep(memory: Memory) -> bool:
            nonlocal number
            if (found := memory.kind_of(seen, ambient)) is None:
                if len(memory.kinds) == MOST_KINDS:
                    context.note(f"calls of more than {MOST_KINDS} kinds: pass a number that varies as a tensor")
                    context.known.kinds = {(*kind.ambient.items(), kind.of_calls) for kind in memory.kinds}
                    return False
                found = len(memory.kinds)
                memory.kinds.append(Kind(ambient))
            number, kind = found, memory.kinds[found]
            if kind.has(seen):
                return False
            if len(kind.calls) == MOST_CALLS:
                context.note(f"calls of more than {MOST_CALLS} sizes: name ranges=, or pad them", "sizes")
                return False
            kind.calls.append(seen)
            return True

        with context.lock:
            known = context.known
            try:
                if (place := known.place) is None or (made := known.made) is None:
                    return ""
                if not context.builds.repairs:  # else the build restores it first
                    Store.create(context.store)
                memory = place.change(msgspec.structs.replace(made, kinds=[]), keep, durable=False)
                if memory is None or number < 0:
                    return ""
                if reason := place.failed(number):
                    context.note_failure(place, place.model(number), reason)
                    return ""
                kind = memory.kinds[number]
                then = known.built_then[number] if number < len(known.built_then) else 0
                return "build" if kind.built < len(kind.calls) else "load" if kind.built > then else ""
            except (AotcError, OSError) as error:
                self.build_nothing(error)
                return ""

    def is_beyond(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is of none of the kinds that are remembered, where there are as many as may be."""
        from aotc.tools.recording.seen_calls import bound_arguments, kind_of_call, without_extents

        context = self._context
        if not context.known.kinds:
            return False
        try:
            bound = bound_arguments(context.module, args, kwargs, context.method)
            gradients = context.options.train and torch.is_grad_enabled()
            seen = {name: without_extents(value, gradients) for name, value in bound.items()}
            return (*ambient_here(context.device).items(), kind_of_call(seen)) not in context.known.kinds
        except Exception:  # the look at the call to be remembered tells of it
            return False

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
        from aotc.tools.remembering.manifest import dtype_to_cast, made_from

        module, options, changed = self._context.module, self._context.options, self._context.changed_names()
        with self._context.in_cells():
            if self._context.no_cells is not None and options.factory is None:
                raise self._context.no_cells
            made = made_from(module, options.factory, options.kwargs, changed)
        return Memory(
            self._context.known.facts,
            options.asked,
            made.factory,
            made.kwargs,
            dtype_to_cast(module),
            state_bytes=sum(tensor.nbytes for tensor in plain_state(module).values()),
            changed=changed,
        )
