"""Arguments that are containers of leaves, and keyword arguments whose order counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotc.records import TUPLE, Parameter
from aotc.runtime.bind import Leaves, StructureMismatch

_IN_ORDER = "pass them in that order: with another, the model may do something else"


def check_order(kwargs: Mapping[str, Any], extras: Sequence[str]) -> None:
    came = [name for name in kwargs if name in extras]
    if came != extras:
        raise StructureMismatch("**kwargs", f"{', '.join(extras)} in this order", dict.fromkeys(came), _IN_ORDER)


ArgumentReader = Callable[[Any, Leaves], None]
SEQUENCES = frozenset({list, tuple, torch.Size})
TUPLES = frozenset({tuple, torch.Size})


def reader_of(parameter: Parameter, any_sequence: bool, any_order: bool, empty_is_none: bool) -> ArgumentReader:
    """A function that puts the leaves of one argument where its parameter's tree says. Raises StructureMismatch."""
    tree = parameter.tree
    read = _reader(tree, parameter.name, any_sequence, any_order)
    if not empty_is_none:
        return read

    def take(value: Any, leaves: Leaves) -> None:
        if value is None or (type(value) is dict and not value):
            value = None if isinstance(tree, int) else {}
        read(value, leaves)

    return take


def _reader(tree: Any, path: str, any_sequence: bool, any_order: bool) -> ArgumentReader:
    if isinstance(tree, int):

        def take(value: Any, leaves: Leaves) -> None:
            leaves[tree] = value

        return take
    if isinstance(tree, list):
        is_tuple = tree[:1] == [TUPLE]
        kinds = SEQUENCES if any_sequence else TUPLES if is_tuple else frozenset({list})
        kind, items = ("tuple", tree[1:]) if is_tuple else ("list", tree)
        count = len(items)
        parts = [_reader(part, f"{path}[{index}]", any_sequence, any_order) for index, part in enumerate(items)]

        def take_sequence(value: Any, leaves: Leaves) -> None:
            if type(value) not in kinds or len(value) != count:
                hint = f"pass {kind}(…) of it: the model may do something else with a value of another type"
                other_type = isinstance(value, list | tuple) and len(value) == count
                raise StructureMismatch(path, f"a {kind} of {count}", value, hint if other_type else "")
            for part, item in zip(parts, value, strict=True):
                part(item, leaves)

        return take_sequence
    names = list(tree)
    members = [(name, _reader(part, f"{path}.{name}", any_sequence, any_order)) for name, part in tree.items()]

    def take_mapping(value: Any, leaves: Leaves) -> None:
        if (
            type(value) is not dict
            or (value.keys() != tree.keys() if any_order else list(value) != names)
            or not all(type(key) is str for key in value)
        ):
            raise _other_mapping(path, names, value)
        for name, part in members:
            part(value[name], leaves)

    return take_mapping


def _other_mapping(path: str, names: Sequence[str], value: Any) -> StructureMismatch:
    expected, hint = f"a dict of {', '.join(names)}" if names else "an empty dict", ""
    if not names and value is None:
        hint = "pass {}; or leave it out of the manifest's `inputs`, and build again for None"
    if type(value) is dict and value.keys() == set(names):
        expected += " in this order" if list(value) != names else ", which are of type str"
        hint = _IN_ORDER
    elif isinstance(value, Mapping) and type(value) is not dict:
        hint = "pass dict(…) of it: the model may do something else with a value of another type"
    return StructureMismatch(path, expected, value, hint)
