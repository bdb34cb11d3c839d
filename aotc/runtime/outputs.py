"""From a library's flat outputs to what the model returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from aotc.errors import CorruptError, LibraryError
from aotc.records import Variant
from aotc.runtime.structure import read_structure

Assemble = Callable[[list[Tensor], Sequence[Any], Sequence[Tensor]], Any]


def make_assembler(variant: Variant, state_index: dict[str, int], *, plain: bool = False) -> Assemble:
    """A function `(library outputs, leaves, state) -> the model's own structure`.

    An output that is an input or a tensor of the module is given back as that very object, and constants as they are,
    as eager does. With `plain`, containers whose class is not imported become dicts and tuples. Raises CorruptError for
    a tree that cannot be read.
    """
    spec = read_structure(variant.output_tree, plain=plain)
    outputs = variant.outputs
    if spec.num_leaves != len(outputs):
        raise CorruptError(f"the record names {len(outputs)} outputs, its structure has {spec.num_leaves}")
    in_order = all(output.index == position for position, output in enumerate(outputs))
    getters = [_getter(output.index, output.leaf, output.state, output.constant, state_index) for output in outputs]

    def flat(raw: list[Tensor], leaves: Sequence[Any], state: Sequence[Tensor]) -> list[Any]:
        if not in_order:
            return [get(raw, leaves, state) for get in getters]
        if len(raw) != len(getters):
            raise LibraryError(f"the library gave {len(raw)} outputs, the record names {len(getters)}")
        return raw

    if spec.is_leaf():
        return lambda raw, leaves, state: flat(raw, leaves, state)[0]
    if spec.type is tuple and all(child.is_leaf() for child in spec.children()):
        return lambda raw, leaves, state: tuple(flat(raw, leaves, state))
    return lambda raw, leaves, state: pytree.tree_unflatten(flat(raw, leaves, state), spec)


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
