"""The operators of a graph, by name, and those that Inductor lowers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from aotc.reads.tensors import dtype_name


def operators_of(graph: fx.Graph) -> set[str]:
    """The names of a graph's operators, and of the graphs within it, such as the branches of a condition."""
    return set(dtypes_by_operator(graph))


def dtypes_by_operator(graph: fx.Graph) -> dict[str, set[str]]:
    """For each of `operators_of`, the dtypes of the tensors that it takes and gives.

    Operators are named like `aten.cat.default` and `higher_order.cond`, functions of Python like `math.floor`.
    """
    parts = graph.owning_module.modules() if graph.owning_module is not None else ()
    graphs = {graph, *(part.graph for part in parts if isinstance(part, fx.GraphModule))}
    found: dict[str, set[str]] = {}
    for node in (node for each in graphs for node in each.nodes if node.op == "call_function"):
        values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        found.setdefault(_name_of(node.target), set()).update(dtype_name(tensor.dtype) for tensor in tensors)
    return found


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target}"
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    module = str(getattr(target, "__module__", "")).lstrip("_")  # `operator` is `_operator`, of C
    return f"{module}.{getattr(target, '__name__', type(target).__name__)}"


@contextmanager
def operators_recorded(lowered: dict[str, set[str]]) -> Iterator[None]:
    """While active, add to `lowered` the `dtypes_by_operator` of every graph that Inductor lowers, after its passes."""
    from torch._inductor.graph import GraphLowering

    run: Any = GraphLowering.run

    def recorded(self: Any, *args: Any) -> Any:
        for name, dtypes in dtypes_by_operator(self.module.graph).items():
            lowered.setdefault(name, set()).update(dtypes)
        return run(self, *args)

    with mock.patch.object(GraphLowering, "run", recorded):
        yield
