"""Functions of torch and of Python that stand in for others while one step of a build runs.

They observe the step (which operators a model calls, what it prints, which files the compiler writes), or direct it
(which instruction sets, which command line, whose measurement). None of them corrects what torch computes or
generates: that is a patch, in `aotc.compiler.patches`, with its reason, its bounds of versions and its reproducer.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock


def replaced(owner: Any, name: str, value: Any, *, create: bool = False) -> AbstractContextManager[Any]:
    """A context in which the attribute `name` of a module, a class or an object is `value`; then it is as before.

    Raises AttributeError where there is no such attribute, as in a torch that renamed it, unless `create`.
    """
    return mock.patch.object(owner, name, value, create=create)


def replaced_items(table: dict[Any, Any], items: Mapping[Any, Any]) -> AbstractContextManager[Any]:
    """A context in which the table has these items, too; then it is as before."""
    return mock.patch.dict(table, items)
