"""Operators that Inductor takes apart as aotc says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def decomposed(functions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Within, a call of one of these operators is replaced by what its function computes, unless it is NotImplemented.

    For operators that Inductor does not take apart itself: its own function would not be asked then.
    """
    from torch._inductor import decomposition

    tables: Any = (decomposition.decompositions, decomposition.fast_random_decomps())
    with mock.patch.dict(tables[0], functions), mock.patch.dict(tables[1], functions):
        yield
