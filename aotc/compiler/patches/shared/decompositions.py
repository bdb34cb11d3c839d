"""Decompositions of operators that replace Inductor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def decomposed(functions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """While active, these functions decompose their operators; where one returns NotImplemented, Inductor's own
    decomposition is used, if there is one."""
    from torch._inductor import decomposition

    tables: Any = (decomposition.decompositions, decomposition.fast_random_decomps())
    with ExitStack() as patches:
        for table in tables:
            asked_first = {name: _first(function, table.get(name)) for name, function in functions.items()}
            patches.enter_context(mock.patch.dict(table, asked_first))
        yield


def _first(function: Callable[..., Any], own: Callable[..., Any] | None) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return own(*args, **kwargs) if result is NotImplemented and own is not None else result

    return compute
