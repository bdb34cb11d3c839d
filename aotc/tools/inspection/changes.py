"""What differs between two JSON values, leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One place where two values differ: `a` or `b` is UNSET (and absent in JSON) where that side has nothing there."""

    path: str
    a: Any = msgspec.UNSET
    b: Any = msgspec.UNSET


def changes(a: Any, b: Any) -> tuple[Change, ...]:
    """Every leaf in which two records, mappings or lists differ, in the order of A's keys and then B's."""
    return tuple(_changes("", msgspec.to_builtins(a), msgspec.to_builtins(b)))


def _changes(path: str, a: Any, b: Any) -> Iterator[Change]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            below = f"{path}.{key}" if path else str(key)
            yield from _changes(below, a.get(key, msgspec.UNSET), b.get(key, msgspec.UNSET))
    elif _are_lists_of_records(a, b):
        for index in range(max(len(a), len(b))):
            pair = [side[index] if index < len(side) else msgspec.UNSET for side in (a, b)]
            yield from _changes(f"{path}[{index}]", *pair)
    elif a != b or type(a) is not type(b):
        yield Change(path, a, b)


def _are_lists_of_records(a: Any, b: Any) -> bool:
    """Lists of plain values (shapes, CPU features) are compared as wholes: that is how a person reads them."""
    lists = isinstance(a, list | tuple) and isinstance(b, list | tuple)
    return lists and any(isinstance(value, dict) for value in (*a, *b))
