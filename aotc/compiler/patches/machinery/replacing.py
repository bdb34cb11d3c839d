"""Replace functions of torch so that torch sees no difference but in what they do.

Inductor looks functions up by `__name__` (a vector's operator that is needed for a scalar), calls them on the class or
on an object, and binds their parameters by position or by name. So a replacement has the name of what it replaces, and
is static, of the class or of the object as that is. `tests/compiler/test_patches.py` compares the signatures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """A context in which a module's function or a class's method is `function`, under its own name.

    `function` is a plain function: of `self`, `cls` or neither, as what it replaces takes them."""
    before = inspect.getattr_static(owner, name, getattr(owner, name, None))
    kind = type(before) if isinstance(before, staticmethod | classmethod) else lambda same: same
    return mock.patch.object(owner, name, kind(_named_as(before, function)))


def replaced_entries(table: dict[Any, Any], functions: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[Any]:
    """A context in which these functions are entries of a table, under the names of the entries that they replace."""
    return mock.patch.dict(table, {key: _named_as(table.get(key), new) for key, new in functions.items()})


def _named_as(before: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    for name in ("__name__", "__qualname__"):
        if hasattr(before, name):
            setattr(function, name, getattr(before, name))
    return function
