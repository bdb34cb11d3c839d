"""Facts: rows of what a module and a process have to be, compared by identity, and their evaluator in Python.

The evaluator in C++ (`aotc.core`) reads the same rows. Facts are made once and never changed: a new object takes their
place.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

Reader = tuple[Callable[[], Any], Any]


class Facts(NamedTuple):
    """Rows, each with what was found.

    slots: a dict, a key, and the value under it (None where it is absent). attributes: an object, a name, the value.
    tables, lists: a dict or list, and a copy that holds the same objects in the same order. empty: dicts that hold
    nothing. classes: an object and its class. lengths: a mapping, and how many keys it has. written: a tensor, how
    often it was written to, and its address. readers: a function, and what it gave.
    """

    slots: tuple[tuple[dict[Any, Any], Any, Any], ...] = ()
    attributes: tuple[tuple[Any, str, Any], ...] = ()
    tables: tuple[tuple[dict[Any, Any], dict[Any, Any]], ...] = ()
    lists: tuple[tuple[list[Any], list[Any]], ...] = ()
    empty: tuple[dict[Any, Any], ...] = ()
    classes: tuple[tuple[Any, type], ...] = ()
    lengths: tuple[tuple[Mapping[str, Any], int], ...] = ()
    written: tuple[tuple[Tensor, int, int], ...] = ()
    readers: tuple[Reader, ...] = ()

    def hold(self) -> bool:
        """Whether all is as it was found. A reader may raise, as may the comparison of what it gives."""
        return (
            all(dict.get(owner, key) is value for owner, key, value in self.slots)
            and all(len(now) == len(copy) and all(map(is_, _flat(now), _flat(copy))) for now, copy in self.tables)
            and all(len(now) == len(copy) and all(map(is_, now, copy)) for now, copy in self.lists)
            and not any(self.empty)
            and all(type(each) is cls for each, cls in self.classes)
            and all(len(each) == length for each, length in self.lengths)
            and all((each._version, each.data_ptr()) == (count, place) for each, count, place in self.written)
            and all(getattr(owner, name) is value for owner, name, value in self.attributes)
            and all(bool(read() == value) for read, value in self.readers)
        )


def _flat(table: dict[Any, Any]) -> Iterator[Any]:
    for item in table.items():
        yield from item


IN_STEP = (dict, OrderedDict, defaultdict)
"""Classes of dicts of which the rows of `tables` say all: others may give other items than they hold."""


def container_rows(containers: Iterable[Any]) -> tuple[list[Any], list[Any], list[Reader]]:
    """Rows of `tables`, of `lists` and, for containers of other classes, of `readers`."""
    tables: list[Any] = []
    lists: list[Any] = []
    readers: list[Reader] = []
    for each in containers:
        if type(each) in IN_STEP:
            tables.append((each, each.copy()))
        elif type(each) is list:
            lists.append((each, each.copy()))
        else:
            readers.append((partial(_identities, each), _identities(each)))
    return tables, lists, readers


def _identities(container: Any) -> list[int]:
    return [*map(id, container.values() if isinstance(container, dict) else container), *map(id, container)]
