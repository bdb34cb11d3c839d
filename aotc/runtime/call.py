"""From a call's arguments to a flat list of leaves, by the signature in the record and Python's own binding rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from aotc.records import Parameter, Signature

Leaves = list[Any]
Binder = Callable[[Sequence[Any], Mapping[str, Any]], Leaves]
SHOWN_TEXT = 60
"""Characters of a text that a message shows."""
SHOWN_NAMES = 8
"""Names of a mapping that a message shows."""


class StructureMismatch(Exception):
    """The call's containers are not those of the signature. Fields: the leaf's or container's path, both structures."""

    def __init__(self, path: str, expected: str, actual: str) -> None:
        super().__init__(f"`{path}` must be {expected}, {actual} came")
        self.path, self.expected, self.actual = path, expected, actual


def make_binder(signature: Signature) -> Binder:
    """A function `(args, kwargs) -> leaves`.

    It raises TypeError where Python itself would (a missing, unexpected or doubled argument), and StructureMismatch
    where a list or mapping has other members than the record says.
    """
    parameters = signature.parameters
    flat = all(parameter.tree == index for index, parameter in enumerate(parameters))
    names = [parameter.name for parameter in parameters]
    positional = sum(parameter.kind != "keyword" for parameter in parameters)
    count = len(parameters)

    def bind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Leaves:
        values = list(args)
        if kwargs or len(values) != count or count != positional:
            _add_keywords(values, kwargs, parameters, positional)
        if flat:
            return values
        leaves: Leaves = [None] * len(signature.leaves)
        for name, parameter, value in zip(names, parameters, values, strict=True):
            _flatten(parameter.tree, value, leaves, name)
        return leaves

    return bind


def _add_keywords(values: Leaves, kwargs: Mapping[str, Any], parameters: Sequence[Parameter], positional: int) -> None:
    given = len(values)
    if given > positional:
        raise TypeError(f"forward() takes {positional} positional arguments but {given} were given")
    used = 0
    for parameter in parameters[given:]:
        if parameter.name in kwargs and parameter.kind != "positional":
            values.append(kwargs[parameter.name])
            used += 1
        elif parameter.default is not msgspec.UNSET:
            values.append(parameter.default)
        else:
            raise TypeError(f"forward() missing the required argument: '{parameter.name}'")
    if used != len(kwargs):
        known = {parameter.name for parameter in parameters[given:]}
        for name in kwargs:
            if name not in known:
                doubled = any(parameter.name == name for parameter in parameters[:given])
                reason = "got multiple values for" if doubled else "got an unexpected keyword"
                raise TypeError(f"forward() {reason} argument '{name}'")
        raise TypeError("forward() got a positional-only argument passed by keyword")


def _flatten(tree: Any, value: Any, leaves: Leaves, path: str) -> None:
    if isinstance(tree, int):
        leaves[tree] = value
    elif isinstance(tree, list):
        if not isinstance(value, list | tuple) or len(value) != len(tree):
            raise StructureMismatch(path, f"a list of {len(tree)}", describe(value))
        for index, (subtree, item) in enumerate(zip(tree, value, strict=True)):
            _flatten(subtree, item, leaves, f"{path}[{index}]")
    else:
        if not isinstance(value, Mapping) or value.keys() != tree.keys():
            raise StructureMismatch(path, f"a mapping of {', '.join(tree)}", describe(value))
        for key, subtree in tree.items():
            _flatten(subtree, value[key], leaves, f"{path}.{key}")


def describe(value: Any) -> str:
    """What came, in a few words, for a message; its values only where they are numbers or texts, as a call's arguments
    are somebody's data, and their `repr` is somebody's code."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} of {str(value.dtype).removeprefix('torch.')} and shape {list(value.shape)}"
    if isinstance(value, dict):
        names = [name[:SHOWN_TEXT] if type(name) is str else describe(name) for name in list(value)[:SHOWN_NAMES]]
        more = f" and {len(value) - SHOWN_NAMES} more" if len(value) > SHOWN_NAMES else ""
        return f"a mapping of {', '.join(names) or 'nothing'}{more}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    kind = type(value)
    if kind is str:
        return f"str {value[:SHOWN_TEXT]!r}" + ("…" if len(value) > SHOWN_TEXT else "")
    if kind in (bool, float, complex) or (kind is int and value.bit_length() <= 64):
        return f"{kind.__name__} {value!r}"
    return kind.__name__
