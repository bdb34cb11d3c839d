"""From a library's flat outputs to what the model returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from aotc.errors import CorruptError, LibraryError
from aotc.records import ResultContainer, Variant

Assemble = Callable[[list[Tensor], Sequence[Any], Sequence[Tensor]], Any]


def make_assembler(variant: Variant, state_index: dict[str, int], *, plain: bool = False) -> Assemble:
    """A function `(library outputs, leaves, state) -> the model's own structure`.

    An output that is an input or a tensor of the module is given back as that very object, and constants as they are,
    as eager does. With `plain`, containers whose class is not imported become dicts and tuples. Raises CorruptError for
    a tree that cannot be read.
    """
    outputs = variant.outputs
    build = result_builder(variant.output_tree, len(outputs), plain=plain)
    in_order = all(output.index == position for position, output in enumerate(outputs))
    getters = [_getter(output.index, output.leaf, output.state, output.constant, state_index) for output in outputs]

    def flat(raw: list[Tensor], leaves: Sequence[Any], state: Sequence[Tensor]) -> list[Any]:
        if not in_order:
            return [get(raw, leaves, state) for get in getters]
        if len(raw) != len(getters):
            raise LibraryError(f"the library gave {len(raw)} outputs, the record names {len(getters)}")
        return raw

    return lambda raw, leaves, state: build(flat(raw, leaves, state))


def result_builder(tree: int | ResultContainer, count: int, *, plain: bool) -> Callable[[list[Any]], Any]:
    """A function from flat outputs to the structure. Raises CorruptError where it does not hold each of them once."""
    used = list(_positions(tree))
    if sorted(used) != list(range(count)):
        raise CorruptError(f"the record names {count} outputs, its structure has the outputs {used[:20]}")
    if isinstance(tree, ResultContainer) and tree.items == tuple(range(count)):
        return _maker(tree, plain)
    return _part_builder(tree, plain)


def _positions(tree: int | ResultContainer) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
    else:
        for item in tree.items:
            yield from _positions(item)


def _part_builder(tree: int | ResultContainer, plain: bool) -> Callable[[list[Any]], Any]:
    if isinstance(tree, int):
        return itemgetter(tree)
    make = _maker(tree, plain)
    parts = [_part_builder(item, plain) for item in tree.items]
    return lambda outputs: make([part(outputs) for part in parts])


def _maker(tree: ResultContainer, plain: bool) -> Callable[[Sequence[Any]], Any]:
    """A function from a container's items to the container."""
    if tree.type == "tuple":
        return tuple
    if tree.type == "list":
        return list
    if tree.type == "dict" and len(set(tree.keys)) == len(tree.items):
        keys = tree.keys
        return lambda items: dict(zip(keys, items, strict=True))
    from aotc.runtime.result_classes import maker

    return maker(tree, plain=plain)


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
