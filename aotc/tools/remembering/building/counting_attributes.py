"""Counters: numbers in a module that each call adds to, and that nothing else of the call depends on.

That is found out by trying, in the process that builds: the number is replaced by a `CountProbe`, which can be added to
and nothing else. Compiled code does not count, so `aotc.compile` adds what a call adds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aotc.reads.attributes import NOT_READ


class CountProbe:
    """In the place of a number: it tells what was added to it, and raises TypeError where it is read."""

    def __init__(self, added: int = 0) -> None:
        self.added = added

    def __add__(self, other: object) -> CountProbe:
        if type(other) is not int:
            return NotImplemented
        return CountProbe(self.added + other)

    __radd__ = __add__

    def __sub__(self, other: object) -> CountProbe:
        return self + -other if type(other) is int else NotImplemented

    def _read(self, *given: object) -> Any:
        raise TypeError("the number is read")

    __bool__ = __eq__ = __ne__ = __hash__ = __str__ = __repr__ = __format__ = _read


def counters_of(module: nn.Module, calls: Sequence[Callable[[], object]], names: Collection[str]) -> dict[str, int]:
    """Of the attributes called `names`, as `layers.0.seen`, those that each call adds the same to and does not read,
    with what it adds."""
    return {name: added for name in names if (added := _added(module, calls, name))}


def _added(module: nn.Module, calls: Sequence[Callable[[], object]], name: str) -> int:
    holder, key = _place_of(module, name)
    if type(before := holder.get(key)) is not int:
        return 0
    found = []
    try:
        for call in calls:
            holder[key] = CountProbe()
            call()
            found.append(holder[key].added if isinstance(holder[key], CountProbe) else 0)
    except Exception:  # it is read, or the call takes no other sizes: what it adds may depend on them
        return 0
    finally:
        holder[key] = before
    return found[0] if found and len(set(found)) == 1 else 0


def example_calls(
    call: Callable[..., object], seen: Mapping[str, Any], modes: Callable[[], Any]
) -> list[Callable[[], object]]:
    """A call like one that was seen, and one whose tensors have a first axis that is longer by one."""

    def made(value: Any, more: int) -> Any:
        from aotc.tools.recording.seen_calls import SeenTensor

        if isinstance(value, SeenTensor):
            shape = (value.shape[0] + more, *value.shape[1:]) if value.shape else ()
            given = torch.full(shape, value.high or 0, dtype=getattr(torch, value.dtype))
            return given.requires_grad_(value.requires_grad)
        if isinstance(value, Mapping):
            return {name: made(item, more) for name, item in value.items()}
        return type(value)(made(item, more) for item in value) if isinstance(value, list | tuple) else value

    def run(more: int) -> object:
        with modes():
            return call(**{name: made(value, more) for name, value in seen.items()})

    return [lambda: run(0), lambda: run(1)]


def with_counters(module: nn.Module, counters: Iterable[str]) -> nn.Module:
    """The module, whose attributes of these names are not compared, as code does not depend on them: for a build."""
    for name in counters:
        holder, key = _place_of(module, name)
        holder[NOT_READ] = tuple(dict.fromkeys([*holder.get(NOT_READ, ()), key]))
    return module


class Counting:
    """What the calls of a module add, if compiled code runs them."""

    def __init__(self, module: nn.Module, counters: Mapping[str, int]) -> None:
        with_counters(module, counters)
        self.places = [(*_place_of(module, name), added) for name, added in counters.items()]

    def add(self) -> None:
        for holder, key, added in self.places:
            if type(now := holder.get(key)) is int:
                holder[key] = now + added


def _place_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    return vars(module.get_submodule(path)), key
