"""The calling convention of a forward: which of its parameters a call passes, by which name and in which way.

One reader for all who ask: the manifest's inputs (`make_signature`), a call that the model makes to a region
(`aotc.models.regions`) and the example call of `aotc init` (`aotc.tools.recording.first_manifest`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import msgspec
from torch import nn

from aotc.manifest.inputs import ConstantInput, InputTree, LeafInput, parse_inputs
from aotc.manifest.types import ModelSpec
from aotc.reads.attributes import has_origins
from aotc.records import TUPLE, ConstantLeaf, Leaf, Parameter, Signature, TensorLeaf

NAMED: Mapping[inspect._ParameterKind, Literal["positional", "either", "keyword"]] = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
}
"""The parameters that a call can pass by a name of their own."""


class UnnamedArguments(TypeError):
    """A call passes arguments through `*name`, where they have no names."""

    def __init__(self, name: str) -> None:
        super().__init__(f"arguments are passed through `*{name}`")
        self.name = name


class BoundArgument(NamedTuple):
    """What a call passes for one parameter: the value, or the default where nothing is given.

    `default` is msgspec.UNSET where the parameter has none that a record can hold.
    """

    name: str
    kind: Literal["positional", "either", "keyword", "extra"]
    value: Any
    default: Any
    given: bool


_signatures: weakref.WeakKeyDictionary[FunctionType, inspect.Signature] = weakref.WeakKeyDictionary()


def signature_of_forward(forward: Callable[..., Any]) -> inspect.Signature:
    """As `inspect.signature`, but of a wrapper that takes these parameters in other places its own: a call binds its
    arguments to that one's. Kept for each function whose methods are asked for, as calls that are recorded do."""
    function = forward.__func__ if isinstance(forward, MethodType) else forward
    if isinstance(function, FunctionType) and vars(function):  # which a wrapper has, and `__signature__` is in
        wrapper = _reordering(function)
        return inspect.signature(forward) if wrapper is None else _own_signature(wrapper, forward)
    if function is forward or not isinstance(function, FunctionType):
        return inspect.signature(forward)
    if (found := _signatures.get(function)) is None:
        found = _signatures[function] = inspect.signature(forward)
    return found


def _reordering(function: FunctionType) -> FunctionType | None:
    """The outermost of a function's wrappers, by `functools.wraps`, that has a parameter of the wrapped function in
    another place than that one has it."""
    declared = [*inspect.signature(function).parameters]
    level: Any = function
    while isinstance(inner := getattr(level, "__wrapped__", None), FunctionType) and isinstance(level, FunctionType):
        own = level.__code__.co_varnames[: level.__code__.co_argcount]
        if any(name in declared and declared.index(name) != place for place, name in enumerate(own)):
            return level
        level = inner
    return None


def _own_signature(function: FunctionType, forward: Callable[..., Any]) -> inspect.Signature:
    """Of a function without what it wraps; of a method without its first parameter."""
    signature = inspect.signature(function, follow_wrapped=False)
    first = 1 if isinstance(forward, MethodType) else 0
    return signature.replace(parameters=[*signature.parameters.values()][first:])


def named_arguments(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of forward's parameters, those through `**kwargs` too.

    Raises TypeError where they do not fit, UnnamedArguments for those through `*args`.
    """
    bound = signature_of_forward(forward).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise UnnamedArguments(name)
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def convention(forward: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[BoundArgument]:
    """How these arguments are passed, in the order of forward's parameters; then those through its `**kwargs`.

    A parameter that is not given has its default, if a record can hold that, and else is not part of the convention.
    Behind one that is left out so, a position would mean another one than in forward: the others go by name.
    """
    declared = signature_of_forward(forward).parameters
    skipped = False
    for name, parameter in declared.items():
        if parameter.kind not in NAMED:
            continue
        default = _plain_default(parameter)
        if name not in given and default is msgspec.UNSET:
            skipped = True
            continue
        kind = "keyword" if skipped else NAMED[parameter.kind]
        yield BoundArgument(name, kind, given.get(name, default), default, name in given)
    own = {name for name, parameter in declared.items() if parameter.kind in NAMED}
    for name, value in given.items():
        if name not in own:
            yield BoundArgument(name, "extra", value, msgspec.UNSET, True)


def _plain_default(parameter: inspect.Parameter) -> Any:
    """A parameter's default where it is a value that a record can hold, else UNSET."""
    value = parameter.default
    plain = value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value))
    return value if plain and value is not inspect.Parameter.empty else msgspec.UNSET


def make_signature(spec: ModelSpec, module: nn.Module) -> Signature:
    """Parameters in forward's order, filled with the leaves that the manifest describes, which are numbered so."""
    trees, inputs = parse_inputs(spec.inputs)
    leaves: list[Leaf] = []
    arguments = with_library_defaults(module, convention(module.forward, dict(sorted(trees.items()))))

    def tree(argument: BoundArgument) -> InputTree:
        if argument.given:
            return _renumber(argument.value, inputs, leaves, spec)
        leaves.append(ConstantLeaf(argument.name, argument.value))
        return len(leaves) - 1

    parameters = tuple(
        Parameter(argument.name, tree(argument), argument.kind, argument.default, _is_optional(argument, inputs))
        for argument in arguments
    )
    return Signature(parameters, tuple(leaves), make_contiguous=spec.make_contiguous)


LIBRARY_DEFAULTS = ("output_attentions", "output_hidden_states", "return_dict")
"""What a call of a model of transformers may say; where it does not, the model's configuration says it."""


def with_library_defaults(module: nn.Module, arguments: Iterable[BoundArgument]) -> Iterator[BoundArgument]:
    """The arguments, and of a model of transformers what a call may say that is so anyway: `generate` passes
    `return_dict=True` to an encoder."""
    config = getattr(module, "config", None)
    values = {name: getattr(config, name, None) for name in LIBRARY_DEFAULTS} if has_origins(module) else {}
    known = {name: value for name, value in values.items() if isinstance(value, bool)}
    for argument in arguments:
        value = known.pop(argument.name, None)
        is_default = not argument.given and argument.value is None and value is not None
        yield argument._replace(value=value, default=value) if is_default else argument
    declared = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared):
        yield from (BoundArgument(name, "extra", value, value, False) for name, value in known.items())


def _is_optional(argument: BoundArgument, inputs: Sequence[LeafInput]) -> bool:
    """Whether a call may leave it out though forward's default is another. `use_cache: false` may be: the
    default is the configuration's, and all that depends on it is whether a cache is returned beside the results."""
    if argument.name != "use_cache" or not argument.given or not isinstance(argument.value, int):
        return False
    leaf = inputs[argument.value]
    return isinstance(leaf, ConstantInput) and leaf.value is False


def _renumber(tree: InputTree, inputs: Sequence[LeafInput], leaves: list[Leaf], spec: ModelSpec) -> InputTree:
    if isinstance(tree, int):
        leaves.append(_leaf(inputs[tree], spec))
        return len(leaves) - 1
    if isinstance(tree, list):
        return [part if part == TUPLE else _renumber(part, inputs, leaves, spec) for part in tree]
    return {name: _renumber(subtree, inputs, leaves, spec) for name, subtree in tree.items()}


def _leaf(leaf: LeafInput, spec: ModelSpec) -> Leaf:
    if isinstance(leaf, ConstantInput):
        return ConstantLeaf(leaf.path, leaf.value)
    return TensorLeaf(
        path=leaf.path,
        dtype=leaf.dtype or spec.dtype or "float32",
        shape=leaf.shape,
        layout=leaf.layout,  # type: ignore[arg-type]
        pad=leaf.pad,
        default=leaf.default,
    )
