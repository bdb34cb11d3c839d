"""Which origins of a module its forward reads: where those differ at load, another code might have been captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from aotc.snapshot import CONFIG_ORIGINS, MODULE_ORIGINS, has_origins, parts_of

_MISSING = object()


@contextmanager
def origins_read(module: nn.Module) -> Iterator[set[str]]:
    """Within, note which of `aotc.snapshot`'s origins are read of the module's submodules or of their configurations.

    Of any object of their classes, so never too few. A configuration that is read as a whole, by its `__dict__`, counts
    as read in each of them.
    """
    read: set[str] = set()
    modules = {type(part) for part in module.modules() if has_origins(part)}
    configs = set(map(type, _configurations(module)))
    with ExitStack() as stack:
        for cls in modules:
            for name in MODULE_ORIGINS:
                stack.enter_context(_replaced(cls, name, _Watch(name, getattr(cls, name, _MISSING), read)))
        for cls in configs:
            stack.enter_context(_replaced(cls, "__getattribute__", _watching(cls, read)))
        yield read


def _configurations(module: nn.Module) -> Iterator[Any]:
    """The configurations among the attributes of the submodules, and within one another."""
    seen: set[int] = set()
    waiting = [value for part in module.modules() for value in vars(part).values()]
    while waiting:
        value = waiting.pop()
        if (parts := parts_of(value)) and id(value) not in seen:
            seen.add(id(value))
            waiting += parts.values()
            if dataclasses.is_dataclass(value) and has_origins(value):
                yield value


@contextmanager
def _replaced(cls: type, name: str, value: Any) -> Iterator[None]:
    before = vars(cls).get(name, _MISSING)
    setattr(cls, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, before)


def _watching(cls: type, read: set[str]) -> Any:
    whole = {"__dict__": CONFIG_ORIGINS, "__getstate__": CONFIG_ORIGINS}  # the latter for copies
    noted = {name: (name,) for name in CONFIG_ORIGINS} | whole
    own: Any = cls.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:
        if name in noted:
            read.update(noted[name])
        return own(self, name)

    return __getattribute__


class _Watch:
    """Stands in the place of an attribute of a class of modules, and notes that it is read.

    Not `__getattribute__`: where a model uses torch.cond, torch traces its parts with Dynamo, which refuses a module
    that has one of its own. Configurations have one anyway.
    """

    def __init__(self, name: str, default: Any, read: set[str]) -> None:
        self._name, self._default, self._read = name, default, read

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is not None:
            self._read.add(self._name)
        value = vars(instance).get(self._name, self._default) if instance is not None else self._default
        if value is _MISSING:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value
