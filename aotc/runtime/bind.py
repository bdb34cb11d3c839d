"""From a call's arguments to a flat list of leaves, by the signature in the record and Python's own binding rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from aotc.records import Parameter, Signature

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
        from aotc.runtime.conversions.structured_arguments import check_order, reader_of

        for each in parameters:
            read.append(reader_of(each, any_sequence, any_order, each.name in empty_is_none))

    def bind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Leaves:
        values = list(args)
        if kwargs or len(values) != count or count != positional:
            _add_keywords(values, kwargs, parameters, positional)
            if ordered:
                check_order(kwargs, ordered)
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
