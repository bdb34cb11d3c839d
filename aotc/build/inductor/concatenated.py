"""What is concatenated, where the model writes to it afterwards.

Inductor computes the parts of a concatenation right where they are wanted, without a copy. What a model writes to such
a part later, by an index, say, or through an operator of its own, is then in the concatenation, too. torch 2.15 copies
the parts where something that is concatenated is written to (`mutated_storages` of its graph.py); so does this for
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree


@contextmanager
def written_parts_are_copied() -> Iterator[None]:
    """Within, what the graph writes to is concatenated as a copy."""
    from torch._inductor import ir, lowering
    from torch._inductor.fx_utils import get_node_storage as storage_of
    from torch._inductor.virtualized import V

    create: Any = ir.ConcatKernel.create
    written_in: dict[fx.Graph, set[int | None]] = {}

    def create_of_copies(parts: Sequence[Any], axis: int) -> Any:
        node = V.graph.current_node
        if node.graph not in written_in:
            values = [value for each in node.graph.nodes for value in _written(each)]
            written_in[node.graph] = {storage_of(value) for value in values} - {None}
        if written_in[node.graph] & {storage_of(part) for part in node.all_input_nodes}:
            parts = [lowering.clone(part) for part in parts]
        return create(parts, axis)

    with mock.patch.object(ir.ConcatKernel, "create", create_of_copies):
        yield


def _written(node: fx.Node) -> list[fx.Node]:
    """The values that a node of the graph writes to in place."""
    if node.target is torch.ops.higher_order.triton_kernel_wrapper_mutation:
        return node.all_input_nodes
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    values = [
        node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for position, argument in enumerate(node.target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [value for value in pytree.tree_leaves(values) if isinstance(value, fx.Node)]
