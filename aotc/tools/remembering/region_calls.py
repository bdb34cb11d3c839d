"""A module whose regions are compiled, for the calls of `aotc.compile` alone: any other call of it runs in eager.

`aotc.load` puts compiled code in the place of the forwards of the module's own parts. Here each of these parts gets a
`PartForward`, which runs such code within a `RegionCode.run` of the same thread, and the part's own forward otherwise:
in calls that record gradients, say, which code for inference would lose in silence.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from aotc.errors import AotcError, BindError, GradientError
from aotc.reads.attributes import own_forward
from aotc.runtime.call import CompiledCall
from aotc.runtime.compiled_regions import CompiledRegions


class Run:
    """One call of a module by regions: the code of its parts, by their identity; whether a part ran in eager since no
    code takes its call; and why, where the part differs from what was built."""

    def __init__(self, forwards: Mapping[int, Callable[..., Any]]) -> None:
        self.forwards = forwards
        self.missed = False
        self.error: AotcError | None = None


class _Here(threading.local):
    run: Run | None = None


_here = _Here()

_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that this thread runs; -1 outside of any."""


class InPlace:
    """Stands among a module's own attributes in the place of a method of its class, but while code is loaded."""

    is_compiled_code = True
    """`aotc.reads` knows it by this: it is not an attribute that the module was given."""


class PartForward(InPlace):
    """In the place of a part's forward. While a backward runs, a part in training runs what it ran last: a checkpoint
    computes the part again, and has to compute the same."""

    def __init__(self, instance: nn.Module) -> None:
        self.instance = instance
        self.own = self.last = own_forward(instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, trains = _here.run, self.instance.training
        if run is None and trains and _backward() != -1:
            return self.last(*args, **kwargs)
        forward = self.own if run is None else run.forwards.get(id(self.instance), self.own)
        if trains:
            self.last = forward
        if run is None:
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs)
        except (BindError, GradientError) as error:  # found before any of the part ran
            run.error, self.last = error, self.own
        return self.own(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of a copied part, which has no attributes yet when this is called: so that is its class's.
        return getattr, (self.instance, "forward")


def in_eager(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module, or its method, with the parts' own forwards, also where its backward computes them again."""
    return _within(Run({}), call, args, kwargs)


def _within(run: Run, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    before, _here.run = _here.run, run
    try:
        return call(*args, **kwargs)
    finally:
        _here.run = before


class RegionCode:
    """The compiled regions of a module, taken out of it: only `run` runs them."""

    def __init__(self, call: CompiledCall, kind: int) -> None:
        assert isinstance(call, CompiledRegions)
        self.call, self.kind = call, kind
        self._forwards = {id(part): vars(part).pop("forward") for part in _parts(call)}
        for region in call.regions.values():
            assert region.module is not None
            region.on_miss = functools.partial(_missed, own_forward(region.module))

    def put(self) -> None:
        """Let the module's parts run this code when `run` is called."""
        for part in _parts(self.call):
            if not isinstance(vars(part).get("forward"), PartForward):
                vars(part)["forward"] = PartForward(part)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Run]:
        run = Run(self._forwards)
        return _within(run, self.call, args, kwargs), run


@contextmanager
def parts_free(module: nn.Module) -> Iterator[None]:
    """While active, the module's parts have their own forwards and methods, so that code can be loaded for them."""
    found = [(vars(part), name, value) for part in module.modules() for name, value in [*vars(part).items()]]
    standing = [each for each in found if isinstance(each[2], InPlace)]
    for attributes, name, _ in standing:
        del attributes[name]
    try:
        yield
    finally:
        for attributes, name, value in standing:
            attributes.setdefault(name, value)


def _parts(call: CompiledRegions) -> list[nn.Module]:
    paths = dict.fromkeys(path for region in call.artifact.regions for path in region.instances)
    return list({id(part): part for part in map(call.module.get_submodule, paths)}.values())


def _missed(forward: Callable[..., Any], error: AotcError, *args: Any, **kwargs: Any) -> Any:
    if _here.run is not None:
        _here.run.missed = True
    return forward(*args, **kwargs)
