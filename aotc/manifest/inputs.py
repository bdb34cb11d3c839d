"""A model's inputs as the manifest writes them, taken apart into leaves: tensors and Python constants; and the
factories that stand in its kwargs.

The rule: a mapping with `shape` (or `dtype` or `init`, which need one) is a tensor; one of `tuple` alone is a tuple;
every other mapping and every list nests; everything else is a constant. The order of keys has no meaning, so leaves
come in the order of sorted names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aotc.manifest.findings import nearest
from aotc.manifest.schema import TENSOR_KEYS, is_tensor, is_tuple
from aotc.manifest.types import KeyPath
from aotc.records import TUPLE, PadRule, Scalar

InputTree = Any
"""The form of `aotc.records.Parameter.tree`."""


@dataclass(frozen=True)
class TensorInput:
    """A tensor that a model takes. `shape` holds sizes and expressions over dims; `dtype` None means the model's."""

    path: str
    shape: tuple[int | str, ...]
    dtype: str | None = None
    init: Any = None
    layout: str = "contiguous"
    pad: dict[str, PadRule] = field(default_factory=dict)
    default: Scalar = None
    requires_grad: bool = False

    @property
    def inits(self) -> tuple[Any, ...]:
        """The `init`s of an input, where there is a list; it is compiled with the first one."""
        return tuple(self.init) if isinstance(self.init, list | tuple) else (self.init,)


@dataclass(frozen=True)
class ConstantInput:
    """A Python value that is compiled in."""

    path: str
    value: Scalar


LeafInput = TensorInput | ConstantInput


def parse_inputs(inputs: Mapping[str, Any]) -> tuple[dict[str, InputTree], tuple[LeafInput, ...]]:
    """The tree of each parameter of `forward`, and the leaves that the trees' indexes point to.

    Raises ValueError for a tensor without a shape and for a pad rule that is neither a scalar nor `edge`.
    """
    leaves: list[LeafInput] = []
    trees = {name: _tree(inputs[name], (name,), leaves) for name in sorted(inputs)}
    return trees, tuple(leaves)


def tensors_in(inputs: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Every tensor's mapping, with its keys, in the order of leaves. A parameter may itself be named `shape`."""
    for name in sorted(inputs):
        yield from _tensors(inputs[name], (name,))


def mistyped_tensors(value: Any, keys: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every nested mapping that is a tensor with a mistyped `shape`: all its keys are like a tensor's, one like `shape`
    and a list. With its keys, that key. A plural, as `shapes`, is a name of its own."""
    if is_tensor(value) and keys:
        return
    if isinstance(value, Mapping) and keys and all(nearest(key, TENSOR_KEYS) for key in value):
        like = [key for key, item in value.items() if nearest(key, TENSOR_KEYS) == "shape" and isinstance(item, list)]
        if like and like[0] != "shapes":
            yield keys, like[0]
    for key, item in (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from mistyped_tensors(item, (*keys, key))


def _tensors(value: Any, keys: KeyPath) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    if is_tensor(value):
        yield keys, value
    elif isinstance(value, Mapping):
        for name in sorted(value):
            yield from _tensors(value[name], (*keys, name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, (*keys, index))


def nested_factory(value: Any) -> tuple[str, Mapping[str, Any]] | None:
    """The reference and kwargs of a value of `kwargs` that is itself made by a factory, like a configuration object."""
    if isinstance(value, Mapping) and isinstance(value.get("factory"), str) and value.keys() <= {"factory", "kwargs"}:
        kwargs = value.get("kwargs", {})
        return (value["factory"], kwargs) if isinstance(kwargs, Mapping) else None
    return None


def nested_factories(kwargs: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Every reference to a factory within `kwargs`, with the keys of its mapping."""
    for name, value in kwargs.items():
        yield from _factories_in(value, (name,))


def _factories_in(value: Any, keys: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if nested := nested_factory(value):
        yield keys, nested[0]
        value, keys = nested[1], (*keys, "kwargs")
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _factories_in(item, (*keys, key))


def leaf_path(keys: KeyPath) -> str:
    """Keys in the user's words: `x`, `batch.ids`, `xs[0]`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")


def _tree(value: Any, keys: KeyPath, leaves: list[LeafInput]) -> InputTree:
    if is_tensor(value):
        leaves.append(_tensor(value, leaf_path(keys)))
        return len(leaves) - 1
    if is_tuple(value):
        return [TUPLE, *(_tree(item, (*keys, index), leaves) for index, item in enumerate(value[TUPLE]))]
    if isinstance(value, Mapping):
        return {name: _tree(value[name], (*keys, name), leaves) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [_tree(item, (*keys, index), leaves) for index, item in enumerate(value)]
    leaves.append(ConstantInput(leaf_path(keys), value))
    return len(leaves) - 1


def _tensor(value: Mapping[str, Any], path: str) -> TensorInput:
    if "shape" not in value:
        raise ValueError(f"the input `{path}` has {' and '.join(sorted(value))}, but no shape")
    return TensorInput(
        path=path,
        shape=tuple(value["shape"]),
        dtype=value.get("dtype"),
        init=value.get("init"),
        layout=value.get("layout", "contiguous"),
        pad={dim: _pad_rule(rule, dim, path) for dim, rule in sorted(value.get("pad", {}).items())},
        default=value.get("default"),
        requires_grad=value.get("requires_grad", False),
    )


def _pad_rule(rule: Any, dim: str, path: str) -> PadRule:
    if rule == "edge":
        return PadRule(edge=True)
    if isinstance(rule, bool | int | float):
        return PadRule(value=rule)
    raise ValueError(f"the input `{path}` pads `{dim}` with {rule!r}; a number, a bool or `edge` is needed")
