"""The values that operators of a graph write to."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree


def written_values(node: fx.Node) -> list[fx.Node]:
    """The values that an operator writes to in place, by its schema, in lists too (`torch._foreach_add_`)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    if node.target is torch.ops.aten.batch_norm.default:  # its schema does not tell
        return [value for value in node.args[3:5] if isinstance(value, fx.Node)] if node.args[5] else []
    values = [
        node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for position, argument in enumerate(node.target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [value for value in pytree.tree_leaves(values) if isinstance(value, fx.Node)]
