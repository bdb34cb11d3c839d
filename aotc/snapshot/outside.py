"""What forward reads outside its module and its arguments: global variables, attributes of classes and of objects that
global variables hold, functions with their defaults and closures, and the environment.

A name is a text: `models.vit:SCALE` is a global variable of a Python module, `models.vit:Block.kind` an attribute of
what one holds, and `$ATTENTION` a variable of the environment. A class of the module tree is found by the tree, so that
a name holds where the class is local to a function.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from aotc.digest import canonical_json, sha256_bytes
from aotc.snapshot.attributes import is_torchs, objects_in, plain_or_type
from aotc.snapshot.sources import public_name

ENVIRONMENT = "$"
ABSENT = ["absent"]
"""The plain value of a name that is not there; no value has this form."""

_environment: dict[Any, Any] = getattr(os.environ, "_data", {})
"""What `os.environ` keeps its variables in, encoded."""


class Step(NamedTuple):
    """Where a value is, on the way to a name's: in a dict under a key, or as an attribute of anything else."""

    owner: Any
    key: Any
    value: Any


class Outside:
    """Names as this process has them, for a module whose classes need not be found by their names."""

    def __init__(self, module: nn.Module) -> None:
        holders = [each for part in module.modules() for each in (part, *(held for _, held in objects_in(part)))]
        classes = {cls for holder in {*map(type, holders)} for cls in holder.__mro__ if not is_torchs(cls)}
        self._classes = {name_of_class(cls): cls for cls in classes}
        self._modules = {public_name(cls.__module__): cls.__module__ for cls in classes}

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """The plain value of each name; what is not plain by its type, ABSENT where it is not there. A name of a Python
        module that this process has not imported has none."""
        found = {name: self._steps(name) for name in names}
        return {name: _plain(name, steps) for name, steps in found.items() if steps is not None}

    def found(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Those of the names that are there, with their values."""
        return ((name, steps[-1].value) for name in names if (steps := self._steps(name)))

    def steps(self, names: Iterable[str]) -> Iterator[Step]:
        """Every place that must stay as it is for the values of these names to stay, but for what containers hold."""
        seen: set[tuple[int, Any]] = set()
        for name in names:
            for step in (found := self._steps(name) or []):
                if (id(step.owner), step.key) not in seen:
                    seen.add((id(step.owner), step.key))
                    yield step
            if found and isinstance(function := found[-1].value, FunctionType) and not is_torchs(function):
                yield from _within(function)

    def _steps(self, name: str) -> list[Step] | None:
        """None where the name's Python module is not imported; [] where the module lacks the name."""
        if name.startswith(ENVIRONMENT):
            variable = os.fsencode(name[1:])
            return [Step(_environment, variable, _environment.get(variable))]
        module_name, _, path = name.partition(":")
        classes = [(cls, path[len(cls.__qualname__) + 1 :]) for key, cls in self._classes.items() if _begins(name, key)]
        value: Any
        if classes:
            value, path = max(classes, key=lambda each: len(each[0].__qualname__))
        elif (module := sys.modules.get(self._modules.get(module_name, module_name))) is not None:
            value = module
        else:
            return None
        steps: list[Step] = []
        for key in path.split("."):
            owner = vars(value) if isinstance(value, ModuleType) else value
            absent = object()
            value = owner.get(key, absent) if isinstance(value, ModuleType) else getattr(value, key, absent)
            if value is absent:
                return []
            steps.append(Step(owner, key, value))
        return steps


def name_of_class(cls: type) -> str:
    return f"{public_name(cls.__module__)}:{cls.__qualname__}"


def _begins(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name[len(prefix) : len(prefix) + 1] == "."


def _plain(name: str, steps: Sequence[Step]) -> Any:
    if not steps:
        return ABSENT
    value = steps[-1].value
    if name.startswith(ENVIRONMENT):  # by its digest, since it may be a secret
        return None if value is None else sha256_bytes(value)
    if isinstance(value, FunctionType | BuiltinFunctionType | type) and is_torchs(value):
        return "torch's own"  # whose name may be another in another version
    return plain_or_type(value)


def _within(function: FunctionType) -> Iterator[Step]:
    yield Step(function, "__code__", function.__code__)
    for key in ("__defaults__", "__kwdefaults__"):
        if (held := getattr(function, key)) is not None:
            yield Step(function, key, held)
    for cell in function.__closure__ or ():
        try:
            yield Step(cell, "cell_contents", cell.cell_contents)
        except ValueError:  # not assigned yet
            continue


def differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The names whose values differ, with both; those that cannot be found here are left out."""
    for name in sorted(recorded.keys() & here.keys()):
        if canonical_json(recorded[name]) != canonical_json(here[name]):  # True is not 1
            yield name, recorded[name], here[name]
