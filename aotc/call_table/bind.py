"""From a call's arguments to a flat list of leaves, by the signature in the record and Python's own binding rules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from aotc.records import TUPLE, Parameter, Signature

Leaves = list[Any]
Binder = Callable[[Sequence[Any], Mapping[str, Any]], Leaves]


class DoesNotBind(TypeError):
    """Python itself would not bind these arguments: one is missing, unexpected or doubled."""


class StructureMismatch(Exception):
    """The call's containers are not those of the signature. Fields: a container's path, what is expected, what came."""

    def __init__(self, path: str, expected: str, came: Any, hint: str = "") -> None:
        super().__init__(path, expected)
        self.path, self.expected, self.came, self.hint = path, expected, came, hint


def make_binder(
    signature: Signature,
    *,
    any_sequence: bool = False,
    any_order: bool = False,
    empty_is_none: Collection[str] = (),
) -> Binder:
    """A function `(args, kwargs) -> leaves`.

    It raises DoesNotBind where Python itself would (a missing, unexpected or doubled argument), and StructureMismatch
    where a container is another than the record says: its members, its type, and the order of a dict's keys and of
    what goes through `**kwargs`, as the model may do something else then. `any_sequence`, `any_order`: it does not.
    `empty_is_none` names the parameters of which None and an empty dict are the same to it.
    """
    parameters = [_with_compiled_default(parameter, signature) for parameter in signature.parameters]
    flat = not empty_is_none and all(parameter.tree == index for index, parameter in enumerate(parameters))
    extras = [each.name for each in parameters if each.kind == "extra" and each.default is msgspec.UNSET]
    ordered = extras if len(extras) > 1 and not any_order else []
    positional = sum(parameter.kind in ("positional", "either") for parameter in parameters)
    count = len(parameters)
    read: list[Callable[[Any, Leaves], None]] = []
    if not flat or ordered:
        for each in parameters:
            read.append(_reader_of(each, any_sequence, any_order, each.name in empty_is_none))

    def bind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Leaves:
        values = list(args)
        if kwargs or len(values) != count or count != positional:
            _add_keywords(values, kwargs, parameters, positional)
            if ordered:
                _check_order(kwargs, ordered)
        if flat:
            return values
        leaves: Leaves = [None] * len(signature.leaves)
        for read_one, value in zip(read, values, strict=True):
            read_one(value, leaves)
        return leaves

    return bind


def _with_compiled_default(parameter: Parameter, signature: Signature) -> Parameter:
    if not parameter.optional:
        return parameter
    return msgspec.structs.replace(parameter, default=signature.leaves[parameter.tree].value)


def _add_keywords(values: Leaves, kwargs: Mapping[str, Any], parameters: Sequence[Parameter], positional: int) -> None:
    given = len(values)
    if given > positional:
        raise DoesNotBind(f"forward() takes {positional} positional arguments but {given} were given")
    used = 0
    for parameter in parameters[given:]:
        if parameter.name in kwargs and parameter.kind != "positional":
            values.append(kwargs[parameter.name])
            used += 1
        elif parameter.default is not msgspec.UNSET:
            values.append(parameter.default)
        else:
            unknown = [name for name in kwargs if name not in {other.name for other in parameters}]
            instead = f", and got an unexpected keyword argument '{unknown[0]}'" if unknown else ""
            raise DoesNotBind(f"forward() missing the required argument: '{parameter.name}'{instead}")
    if used != len(kwargs):
        known = {parameter.name for parameter in parameters[given:]}
        for name in kwargs:
            if name not in known:
                doubled = any(parameter.name == name for parameter in parameters[:given])
                reason = "got multiple values for" if doubled else "got an unexpected keyword"
                raise DoesNotBind(f"forward() {reason} argument '{name}'")
        raise DoesNotBind("forward() got a positional-only argument passed by keyword")


# -- containers -------------------------------------------------------------------------------------------------------

_IN_ORDER = "pass them in that order: with another, the model may do something else"


def _check_order(kwargs: Mapping[str, Any], extras: Sequence[str]) -> None:
    came = [name for name in kwargs if name in extras]
    if came != extras:
        raise StructureMismatch("**kwargs", f"{', '.join(extras)} in this order", dict.fromkeys(came), _IN_ORDER)


ArgumentReader = Callable[[Any, Leaves], None]


def tuples() -> frozenset[type]:
    """The classes that a record writes as a tuple: with torch imported, torch.Size is one."""
    return frozenset({tuple, getattr(sys.modules.get("torch"), "Size", tuple)})


def sequences() -> frozenset[type]:
    """The classes that match both a list and a tuple, for a model that takes either."""
    return frozenset({list, *tuples()})


def _reader_of(parameter: Parameter, any_sequence: bool, any_order: bool, empty_is_none: bool) -> ArgumentReader:
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
        kinds = sequences() if any_sequence else tuples() if is_tuple else frozenset({list})
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
