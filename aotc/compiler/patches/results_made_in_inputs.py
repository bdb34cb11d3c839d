"""[inductor] A result that is also copied to an input is the input.

It may be computed in the memory of that input. If the graph returned the tensor, it returned the input, and the next
call changed the result. In eager the result has its own memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, leaves

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0028",
    operators=("aten.copy_",),
    upstream="pytorch#198096",
    targets=("torch._inductor.fx_passes.reinplace:reinplace_inplaceable_ops_core(graph)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, results of the graph are not computed in the memory of an input to which they are copied: a copy is
    returned.
    """
    from torch._inductor.fx_passes import reinplace

    reinplace_core = reinplace.reinplace_inplaceable_ops_core

    def reinplace_what_is_not_returned(graph: fx.Graph) -> None:
        _return_copies(graph)
        reinplace_core(graph)

    with replaced(reinplace, "reinplace_inplaceable_ops_core", reinplace_what_is_not_returned):
        yield


def _return_copies(graph: fx.Graph) -> None:
    """If the graph writes to inputs, replace returned tensors that may be computed in an input's memory by copies, also
    where they are written to other inputs.

    A copy is made once, directly after the tensor is computed, so that outputs that share memory still share it.
    """
    from torch._inductor.fx_passes import reinplace
    from torch.fx.passes.reinplace import _is_view_op

    operators = torch.ops.higher_order
    made_in_place = {
        *reinplace.inplaceable_ops,
        *reinplace.inplaceable_foreach_ops,
        *reinplace.inplaceable_triton_ops,
        operators.auto_functionalized,
        operators.auto_functionalized_v2,
    }
    copies: dict[fx.Node, fx.Node] = {}

    def is_view(node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return is_view(cast("fx.Node", node.args[0]))
        return bool(_is_view_op(node.target))

    def root_of(node: fx.Node) -> fx.Node:
        while is_view(node) or node.target is operator.getitem:
            node = cast("fx.Node", node.args[0])
        return node

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            base = copy_of(cast("fx.Node", node.args[0])) if is_view(node) else None
            call: Any = (torch.ops.aten.clone.default, node) if base is None else (node.target, base, *node.args[1:])
            with graph.inserting_after(node):
                copies[node] = reinplace.graph_call_function(graph, *call, **(node.kwargs if base else {}))
        return copies[node]

    def may_lie_in(node: fx.Node, memory: Any) -> bool:
        root = root_of(node)
        return root is memory or (
            root.target in made_in_place and any(may_lie_in(given, memory) for given in root.all_input_nodes)
        )

    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    for user in (*writes, graph.output_node()) if writes else ():
        for value in user.all_input_nodes:
            if root_of(value).target in made_in_place and (user not in writes or not may_lie_in(value, user.args[0])):
                user.replace_input_with(value, copy_of(value))


def reproduce(patches: Torch) -> None:
    def function(memory: Tensor, x: Tensor) -> Tensor:
        changed = memory.slice_scatter(x, 0, 1, 2)
        memory.copy_(changed)
        return changed

    compiled, memory = patches.compiled(function, torch.zeros(4, 3), torch.ones(1, 3)), torch.zeros(4, 3)
    with torch.no_grad():
        result = leaves(compiled(memory, torch.ones(1, 3)))[0]
    result.add_(100)
    assert memory.sum() == 3, "what the caller writes to a result is in the input"
