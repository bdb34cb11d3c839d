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

from torch import nn

from aotc.errors import AotcError, BindError, GradientError
from aotc.runtime.call import own_forward
from aotc.runtime.compiled import Compiled
from aotc.runtime.regions import CompiledByRegions


class Run:
    """One call of a module by regions: the code of its parts, by their identity; whether a part ran in eager since no
    code takes its call; and why, where the part is no longer what was built."""

    def __init__(self, forwards: Mapping[int, Callable[..., Any]]) -> None:
        self.forwards = forwards
        self.missed = False
        self.error: AotcError | None = None


class _Here(threading.local):
    run: Run | None = None


_here = _Here()


class PartForward:
    """In the place of a part's forward. In training it runs outside of a call what it ran last: a checkpoint computes
    the part again while the backward runs, and has to compute the same."""

    is_compiled_code = True
    """`aotc.reads` knows it by this: it is not a forward that the module was given."""

    def __init__(self, instance: nn.Module) -> None:
        self.instance = instance
        self.own = self.last = own_forward(instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = _here.run
        if run is None:
            return (self.last if self.instance.training else self.own)(*args, **kwargs)
        self.last = forward = run.forwards.get(id(self.instance), self.own)
        try:
            return forward(*args, **kwargs)
        except (BindError, GradientError) as error:  # found before any of the part ran
            run.error, self.last = error, self.own
        return self.own(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of a copied part, which has no attributes yet when this is called: so that is its class's.
        return getattr, (self.instance, "forward")


def in_eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the module with the parts' own forwards, also where its backward computes them again."""
    return _within(Run({}), module, args, kwargs)


def _within(run: Run, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    before, _here.run = _here.run, run
    try:
        return call(*args, **kwargs)
    finally:
        _here.run = before


class RegionCode:
    """The compiled regions of a module, taken out of it: only `run` runs them."""

    def __init__(self, compiled: Compiled, kind: int) -> None:
        assert isinstance(compiled, CompiledByRegions) and compiled.module is not None
        self.compiled, self.kind = compiled, kind
        self._forwards: dict[int, Callable[..., Any]] = {}
        for part in _parts(compiled):
            self._forwards[id(part)] = vars(part).pop("forward")
        for call in compiled.regions.values():
            assert call.module is not None
            call.on_miss = functools.partial(_missed, own_forward(call.module))

    def put(self) -> None:
        """Let the module's parts run this code when `run` is called."""
        for part in _parts(self.compiled):
            if not isinstance(vars(part).get("forward"), PartForward):
                vars(part)["forward"] = PartForward(part)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Run]:
        run = Run(self._forwards)
        return _within(run, self.compiled, args, kwargs), run


@contextmanager
def parts_free(module: nn.Module) -> Iterator[None]:
    """While active, the module's parts have their own forwards, so that code can be loaded for them."""
    found = [(vars(part), vars(part).get("forward")) for part in module.modules()]
    standing = [(attributes, forward) for attributes, forward in found if isinstance(forward, PartForward)]
    for attributes, _ in standing:
        del attributes["forward"]
    try:
        yield
    finally:
        for attributes, forward in standing:
            attributes.setdefault("forward", forward)


def _parts(compiled: Compiled) -> list[nn.Module]:
    assert compiled.module is not None
    paths = dict.fromkeys(path for region in compiled.artifact.regions for path in region.instances)
    return list({id(part): part for part in map(compiled.module.get_submodule, paths)}.values())


def _missed(forward: Callable[..., Any], error: AotcError, *args: Any, **kwargs: Any) -> Any:
    if _here.run is not None:
        _here.run.missed = True
    return forward(*args, **kwargs)
