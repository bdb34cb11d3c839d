"""[inductor] What is written to a part of a concatenation is in the concatenation.

Expected: `torch.cat` copies. Seen: `ConcatKernel` computes the part within the result, where later writes to the part,
by an index or through a custom operator, are seen. torch 2.15 copies the parts if one of them is written to
(`mutated_storages` of its graph.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from aotc.compiler.capture.lifting.mutations import written_values
from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0039",
    operators=("aten.cat", "aten.concat", "aten.stack"),
    torch=">=2.11,<2.15",
    targets=("torch._inductor.ir:ConcatKernel.create(inputs, dim)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, tensors that the graph writes to are concatenated as copies."""
    from torch._inductor import ir, lowering
    from torch._inductor.fx_utils import get_node_storage as storage_of
    from torch._inductor.virtualized import V

    create: Any = ir.ConcatKernel.create
    written_in: dict[fx.Graph, set[int | None]] = {}

    def create_of_copies(cls: Any, inputs: Sequence[Any], dim: int) -> Any:
        node = V.graph.current_node
        if node.graph not in written_in:
            values = [value for each in node.graph.nodes for value in _written(each)]
            written_in[node.graph] = {storage_of(value) for value in values} - {None}
        if written_in[node.graph] & {storage_of(part) for part in node.all_input_nodes}:
            inputs = [lowering.clone(part) for part in inputs]
        return create(inputs, dim)

    with replaced(ir.ConcatKernel, "create", create_of_copies):
        yield


def _written(node: fx.Node) -> list[fx.Node]:
    """The values that a node of the graph writes to in place; for a Triton kernel, all its inputs."""
    if node.target is torch.ops.higher_order.triton_kernel_wrapper_mutation:
        return node.all_input_nodes
    return written_values(node)


def reproduce(patches: Torch) -> None:
    def function(x: Tensor, index: Tensor) -> list[Tensor]:
        first = x * 2
        rows = torch.cat([first, x])
        first[index] = 7
        return [rows, first]

    assert_same(patches.compiled, function, torch.randn(4, 5), torch.tensor([3, 0, 3]))
