"""Record the attributes of a module, and of the objects in it, that forward reads: compiled code depends on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from aotc.reads.attributes import (
    CONFIG_ORIGINS,
    TORCHS_OWN,
    has_origins,
    is_anothers,
    module_origins,
    objects_in,
    parts_of,
    slots_in,
)

_MISSING = object()

_OF_A_PROCESS = "._original_object_hash"
"""What transformers keeps in a GenerationConfig: the hash of a text, which is another one in each process."""


class AttributeReads:
    """The attributes that were read.

    names: `Class.attribute` of each attribute that was read from any object of the class, and not written to.
    origins: the origins of `aotc.reads` that were read.
    """

    def __init__(self) -> None:
        self.origins: set[str] = set()
        self._all: set[str] = set()
        self.names_read: set[str] = set()
        self._written: set[str] = set()

    @property
    def names(self) -> set[str]:
        return self.names_read - self._written

    def take_all(self) -> None:
        """Count every attribute as read: torch's Dynamo traces branches of `torch.cond`, and its reads are not seen."""
        self.names_read |= {name for name in self._all if not name.endswith(_OF_A_PROCESS)}


@contextmanager
def attributes_read(module: nn.Module) -> Iterator[AttributeReads]:
    """While active, record reads of attributes of the module's submodules and of the objects that these hold.

    Reads from any object of their classes count, so the result is never too small. Class attributes are included, since
    an object may get its own. A configuration that is read as a whole, by `__dict__`, counts as read in each origin.
    """
    reads = AttributeReads()
    parts = list(module.modules())
    names: dict[type, set[str]] = {}
    for holder in (*parts, *(found for part in parts for _, found in objects_in(part))):
        names.setdefault(type(holder), set()).update(_names_of(holder))
    for cls in names:
        reads.names_read |= {f"{cls.__qualname__}.{name}" for base in cls.__mro__ for name in slots_in(base)}
    reads._all |= {f"{cls.__qualname__}.{name}" for cls, attributes in names.items() for name in attributes}
    configurations = set(map(type, _configurations(module)))
    with ExitStack() as stack:
        for cls, attributes in names.items():
            if cls in configurations:
                stack.enter_context(_replaced(cls, "__getattribute__", _watching(cls, attributes, reads)))
                continue
            for name in sorted(attributes):
                watch = _Watch(name, getattr(cls, name, _MISSING), reads)
                try:
                    stack.enter_context(_replaced(cls, name, watch))
                except (AttributeError, TypeError):  # raised by a metaclass
                    reads.names_read.add(f"{cls.__qualname__}.{name}")
        yield reads


@contextmanager
def absences(module: nn.Module) -> Iterator[set[str]]:
    """While active, record `Class.attribute` of what is asked of the module's submodules and of the objects that these
    hold, and that they lack: `hasattr`, `getattr` with a default. torch.export does not reach this hook."""
    asked: set[str] = set()
    held: set[type] = {type(found) for part in module.modules() for _, found in objects_in(part)}
    with ExitStack() as stack:
        for cls in held | {nn.Module}:
            with suppress(AttributeError, TypeError):  # raised by a metaclass
                stack.enter_context(_replaced(cls, "__getattr__", _noting(cls, asked)))
        yield asked


def _noting(cls: type, asked: set[str]) -> Any:
    """A `__getattr__` that records names which neither an object nor its class has."""
    own: Any = getattr(cls, "__getattr__", None)

    def __getattr__(self: Any, name: str) -> Any:
        try:
            if own is not None:
                return own(self, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        except AttributeError:
            if not name.startswith("__") and name not in TORCHS_OWN:
                asked.add(f"{type(self).__qualname__}.{name}")
            raise

    return __getattr__


def _names_of(holder: Any) -> Iterator[str]:
    """The names of an object's data attributes, without torch's own and without computed ones (descriptors)."""
    cls = type(holder)
    if issubclass(cls, torch.jit.ScriptModule):
        return
    shared = {name: value for base in reversed(cls.__mro__) if is_anothers(base) for name, value in vars(base).items()}
    origins = module_origins(holder) if isinstance(holder, nn.Module) else ()
    own = getattr(holder, "__dict__", {})
    for name in dict.fromkeys([*own, *shared, *origins]):
        if isinstance(holder, nn.Module) and name in TORCHS_OWN:
            continue
        of_class = getattr(cls, name, None)
        if name in own:  # perhaps in the place of a method's, or of what a `cached_property` computes
            if not hasattr(of_class, "__set__") and not (callable(of_class) and callable(own[name])):
                yield name
        elif not name.startswith("__") and not callable(of_class) and not hasattr(of_class, "__get__"):
            yield name


def _configurations(module: nn.Module) -> Iterator[Any]:
    """The configurations among the attributes of the submodules, nested ones included."""
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


def _watching(cls: type, names: Collection[str], reads: AttributeReads) -> Any:
    whole = {"__dict__": CONFIG_ORIGINS, "__getstate__": CONFIG_ORIGINS}  # `__getstate__` for copies
    noted = {name: (name,) for name in CONFIG_ORIGINS} | whole
    own: Any = cls.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:
        if name in noted:
            reads.origins.update(noted[name])
        if name in names:
            reads.names_read.add(f"{type(self).__qualname__}.{name}")
        return own(self, name)

    return __getattribute__


class _Watch:
    """A descriptor in place of a class's attribute, which records reads and writes.

    Not `__getattribute__`: for a model with torch.cond, torch traces the branches with Dynamo, which refuses modules
    that define it, and changes of a set. Configurations get one all the same.
    """

    def __init__(self, name: str, default: Any, reads: AttributeReads) -> None:
        self._name, self._default, self.names_reads = name, default, reads

    def __get__(self, instance: Any, owner: type) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            self.names_reads.names_read.add(f"{owner.__qualname__}.{self._name}")  # also of the class itself
            if isinstance(instance, nn.Module) and self._name in module_origins(instance):
                self.names_reads.origins.add(self._name)
        if instance is not None and self._name in vars(instance):
            return vars(instance)[self._name]
        if self._default is _MISSING:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        descriptor = getattr(type(self._default), "__get__", None)
        return descriptor(self._default, instance, owner) if descriptor is not None else self._default

    def __set__(self, instance: Any, value: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.names_reads._written.add(f"{type(instance).__qualname__}.{self._name}")
        vars(instance)[self._name] = value

    def __delete__(self, instance: Any) -> None:
        if self._name not in vars(instance):
            raise AttributeError(self._name)
        del vars(instance)[self._name]
