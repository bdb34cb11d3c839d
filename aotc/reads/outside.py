"""What forward reads outside its module and its arguments: global variables, attributes of classes and of objects that
global variables hold, functions with their defaults and closures, and the environment.

A name is a text: `models.vit:SCALE` is a global variable of a Python module, `models.vit:Block.kind` an attribute of
what one holds, `models.vit:` the module itself, and `$ATTENTION` a variable of the environment. A class of the module
tree is found by the tree, so that a name holds where the class is local to a function.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from aotc.digest import canonical_json, sha256_bytes
from aotc.reads.attributes import (
    TORCHS_OWN,
    contents_of,
    is_descriptor,
    is_torchs,
    objects_in,
    own_attributes,
    plain_or_type,
    read_attributes,
)
from aotc.reads.sources import public_name
from aotc.records import Artifact, File, Reads, decode

ENVIRONMENT = "$"
ABSENT = ["absent"]
"""The plain value of a name that is not there; no value has this form."""

_environment: dict[Any, Any] = getattr(os.environ, "_data", {})
"""The dict in which `os.environ` keeps its variables, encoded."""


class Step(NamedTuple):
    """Where a value is, on the way to a name's: in a dict under a key, or as an attribute of anything else."""

    owner: Any
    key: Any
    value: Any


class Outside:
    """Names as this process has them, for a module whose classes need not be found by their names."""

    def __init__(self, module: nn.Module) -> None:
        holders = [each for part in module.modules() for each in (part, *(held for _, held in objects_in(part)))]
        classes = [cls for kind in dict.fromkeys(map(type, holders)) for cls in kind.__mro__ if not is_torchs(cls)]
        # Of two that go by one name, as a class and a subclass that stands for it, the more derived one.
        self._classes = {name_of_class(cls): cls for cls in reversed(classes)}
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
        """Every place that must not change for the values of these names to stay, without entries of containers."""
        seen: set[tuple[int, Any]] = set()
        for name in names:
            for step in (found := self._steps(name) or []):
                if (id(step.owner), step.key) not in seen:
                    seen.add((id(step.owner), step.key))
                    yield step
            if found:
                yield from within(found[-1].value)

    def unimported(self, names: Iterable[str]) -> dict[str, Step]:
        """Those of the names that no `values` has, with the places of the Python modules that would have them."""
        of = {name: name.partition(":")[0] for name in names if self._steps(name) is None}
        places = {name: self._modules.get(module, module) for name, module in of.items()}
        return {name: Step(sys.modules, module, sys.modules.get(module)) for name, module in places.items()}

    def _steps(self, name: str) -> list[Step] | None:
        """None where the Python module, or what a lazy one offers, is not imported; [] where it lacks the name, and is
        not torch's."""
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
        if not path:
            return [Step(sys.modules, value.__name__, value)]
        steps: list[Step] = []
        for key in path.split("."):
            is_entry = isinstance(value, ModuleType) or (
                isinstance(value, dict) and key in getattr(value, "__dict__", ())
            )
            owner = vars(value) if is_entry else type(value) if isinstance(value, dict) else value  # no key of a dict
            holder = value
            value = owner.get(key, _ABSENT) if isinstance(owner, dict) else attribute_of(owner, key)
            if value is _ABSENT and isinstance(owner, dict) and key in vars(builtins):
                steps.append(Step(owner, key, None))  # which would hide Python's own
                owner, value = vars(builtins), vars(builtins)[key]
            if value is _ABSENT:  # of torch's, in another version; of a lazy module's, which it imports when asked
                is_lazy = isinstance(holder, ModuleType) and key in dir(holder)
                return None if is_lazy or module_name.partition(".")[0] == "torch" else []
            steps.append(Step(owner, key, value))
        return steps


_ABSENT: Any = object()


def attribute_of(holder: Any, name: str) -> Any:
    """The attribute of a class or an object, a descriptor of a class of the model's own as it is."""
    held = next((vars(cls)[name] for cls in getattr(holder, "__mro__", ()) if name in vars(cls)), None)
    return held if is_descriptor(held) else getattr(holder, name, _ABSENT)


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


def within(value: Any, depth: int = 4) -> Iterator[Step]:
    """The places in a function, and in functions that it holds, as a decorator does; in a module, its attributes and
    tensors; in a descriptor of the model's own, its attributes."""
    if isinstance(value, nn.Module):
        for part in value.modules():
            yield from (Step(vars(part), key, held) for key, held in vars(part).items() if key not in TORCHS_OWN)
            for table in (part._parameters, part._buffers):
                yield from (Step(table, key, held) for key, held in table.items())
        return
    if isinstance(value, partial):
        yield from within(value.func, depth)
    elif isinstance(value, property):
        yield from within(value.fget, depth)
    elif is_descriptor(value):
        yield from (Step(value, key, held) for key, held in (own_attributes(value) or {}).items())
    function = getattr(value, "__func__", value)
    if not isinstance(function, FunctionType) or is_torchs(function) or not depth:
        return
    yield Step(function, "__code__", function.__code__)
    held = [Step(function, key, getattr(function, key)) for key in ("__defaults__", "__kwdefaults__")]
    yield from (step for step in held if step.value is not None)
    for cell in function.__closure__ or ():
        if (inner := contents_of(cell)) is not None:
            yield Step(cell, "cell_contents", inner)
            yield from within(inner, depth - 1)


# -- compared with a record --------------------------------------------------------------------------------------------

ReadFile = Callable[[File], bytes]


def recorded_reads(artifact: Artifact, read_file: ReadFile) -> Iterator[tuple[tuple[str, ...], Reads]]:
    """What the captures of the variants read: the names of attributes, and all values. Raises CorruptError."""
    for names, file in {(variant.reads, variant.read_values): None for variant in artifact.variants}:
        if file is not None:
            yield names, decode(read_file(file), Reads)


def read_here(module: nn.Module, names: Collection[str], recorded: Reads) -> Reads:
    """The same of this module and process. What cannot be found here is as it was recorded."""
    outside = Outside(module).values(recorded.outside)
    return Reads(read_attributes(module, names), {**recorded.outside, **outside})


def changed_names(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The names whose values differ, with both; those that cannot be found here are left out."""
    for name in sorted(recorded.keys() & here.keys()):
        if canonical_json(recorded[name]) != canonical_json(here[name]):  # True is not 1
            yield name, recorded[name], here[name]
