"""Calls with a cache of transformers: its tensors are arguments, which the call writes to or gives anew.

A cache is an object with layers, and a call changes it. A build knows tensors and plain values. So for such calls the
module stands within another one, whose forward takes a cache as a mapping of its `structure`, a text of plain data, and
its `tensors`; makes the object within; and gives the result with what the call has changed. `ByCache` puts that into
the caller's own cache.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aotc.tools.remembering.by_mode import ByMode, remembering_of
from aotc.tools.remembering.caches.cache_module import MARK, replaced, with_cache
from aotc.tools.remembering.caches.cache_structure import apart, is_apart, is_cache_class, together
from aotc.tools.remembering.call_counts import CallCounts, summed
from aotc.tools.remembering.compile_options import Options
from aotc.tools.remembering.compile_state import CompileState
from aotc.tools.remembering.remembering import Remembering


def takes_caches(module: nn.Module) -> bool:
    """Whether callers may pass caches of transformers."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.partition(".")[0] == "transformers"
        for base in type(module).__mro__
    )


class ByCache:
    """The calls of a module, of which those with caches are of another module."""

    def __init__(self, module: nn.Module, options: Options) -> None:
        self.module, self._options = module, options
        self.without = remembering_of(module, None, options)
        patterns = options.regions
        if patterns is not None and not isinstance(patterns, str):
            options = options._replace(regions=[f"module.{pattern}" for pattern in patterns])
        self._within = Remembering(with_cache(module), None, options._replace(train=False))

    def like(self, module: nn.Module) -> ByCache:
        """The calls of a copy of the module."""
        made = ByCache(module, self._options._replace(retry=False))
        for ours, copied in zip(self.of_both, made.of_both, strict=True):
            copied.context.by_calls.update(ours.context.by_calls)
        return made

    @property
    def of_both(self) -> list[Remembering | ByMode]:
        return [self.without, self._within]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caches: list[Any] = []

        def taken(value: Any) -> Any:
            if not is_cache_class(type(value)):
                return value
            caches.append(value)
            parts = apart(value)
            return parts | {"tensors": moved(parts["tensors"], self.module)}

        if self.module.training or "forward" in vars(self.module):
            return self.without(*args, **kwargs)
        try:
            given = [taken(value) for value in args]
            named = {name: taken(value) for name, value in kwargs.items()}
        except TypeError as error:
            return self._within.in_eager(str(error), *args, **kwargs)["result"]
        if not caches:
            return self.without(*args, **kwargs)
        vars(self._within.module)["training"] = False
        before = [each for each in [*given, *named.values()] if is_apart(each)]
        found = self._within(*given, **named)
        for cache, given_as, now in zip(caches, before, found["caches"], strict=True):
            _put_back(cache, given_as, now)
        marks = {MARK.format(index): cache for index, cache in enumerate(caches)}
        return replaced(found["result"], lambda value: marks.get(value, value) if type(value) is str else value)

    def state(self) -> CompileState:
        """As `Remembered.explain`, of both."""
        plain, within = (each.state() for each in self.of_both)
        if not within.calls.forms:
            return plain
        if not plain.calls.forms:
            return within._replace(calls=self.stats())
        return plain._replace(
            forms=plain.forms + within.forms,
            built=plain.built + within.built,
            building=plain.building or within.building,
            models=plain.models + within.models,
            failed=plain.failed | within.failed,
            notes=tuple(dict.fromkeys(plain.notes + within.notes)),
            calls=self.stats(),
        )

    def stats(self) -> CallCounts:
        """As `Remembered.stats`, of both."""
        return summed(each.stats() for each in self.of_both)

    def wait(self, timeout: float | None = None) -> bool:
        """As `Remembered.wait`, of both, as far as calls were seen."""
        ends = None if timeout is None else time.monotonic() + timeout
        seen = [each for each in self.of_both if each.state().forms] or [self.without]
        are_built = [each.wait(None if ends is None else max(0.0, ends - time.monotonic())) for each in seen]
        return all(are_built)


def moved(tensors: Sequence[Tensor], module: nn.Module) -> list[Tensor]:
    """The tensors, with numbers on the CPU moved to the module's device.

    transformers makes the lengths of a StaticCache on the CPU, and moves them in its first call.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    return [each.to(device) if not each.dim() and each.device != device else each for each in tensors]


def _put_back(cache: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Let the caller's cache be what the call has made of it."""
    tensors = now["tensors"]
    are_same = len(tensors) == len(before["tensors"]) and all(
        type(each) is int and each == at for at, each in enumerate(tensors)
    )
    if now["structure"] != before["structure"] or not are_same:
        held = (before["tensors"][each] if type(each) is int else each for each in tensors)
        together(json.loads(now["structure"]), held, cache)
