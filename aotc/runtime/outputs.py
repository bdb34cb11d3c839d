"""From a library's flat outputs to what the model returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from aotc.errors import LibraryError
from aotc.records import Variant

Assemble = Callable[[list[Tensor], Sequence[Any], Sequence[Tensor]], Any]


def make_assembler(variant: Variant, state_index: dict[str, int], *, plain: bool = False) -> Assemble:
    """A function `(library outputs, leaves, state) -> the model's own structure`.

    An output that is an input or a tensor of the module is given back as that very object, and constants as they are,
    as eager does. With `plain`, containers whose class is not imported become dicts and tuples. Raises CorruptError for
    a tree that cannot be read.
    """
    outputs = variant.outputs
    build = _builder(variant.output_tree, len(outputs), plain=plain)
    in_order = all(output.index == position for position, output in enumerate(outputs))
    getters = [_getter(output.index, output.leaf, output.state, output.constant, state_index) for output in outputs]

    def flat(raw: list[Tensor], leaves: Sequence[Any], state: Sequence[Tensor]) -> list[Any]:
        if not in_order:
            return [get(raw, leaves, state) for get in getters]
        if len(raw) != len(getters):
            raise LibraryError(f"the library gave {len(raw)} outputs, the record names {len(getters)}")
        return raw

    return lambda raw, leaves, state: build(flat(raw, leaves, state))


_LEAF = '{"type": null, "context": null, "children_spec": []}'


def _builder(tree: str, count: int, *, plain: bool) -> Callable[[list[Any]], Any]:
    """From flat outputs to the structure. That of one output, and of a tuple of outputs, is known by its text."""
    if count == 1 and tree == f"[1, {_LEAF}]":
        return itemgetter(0)
    leaves = ", ".join([_LEAF] * count)
    if tree == f'[1, {{"type": "builtins.tuple", "context": "null", "children_spec": [{leaves}]}}]':
        return tuple
    from aotc.runtime.structure import read_builder

    return read_builder(tree, count, plain=plain)


def _getter(
    index: int | None, leaf: int | None, state: str | None, constant: Any, state_index: dict[str, int]
) -> Callable[[list[Tensor], Sequence[Any], Sequence[Tensor]], Any]:
    if index is not None:
        return lambda raw, leaves, tensors: raw[index]
    if leaf is not None:
        return lambda raw, leaves, tensors: leaves[leaf]
    if state is not None:
        position = state_index[state]
        return lambda raw, leaves, tensors: tensors[position]
    return lambda raw, leaves, tensors: constant
