"""Concatenations whose parts the model writes to afterwards, and concatenations of a single part.

Inductor computes the parts of a concatenation in place, without a copy. If the model writes to such a part later (by an
index, or through a custom operator), the concatenation changes, too. torch 2.15 copies the parts if one of them is
written to (`mutated_storages` of its graph.py); so does this patch for other versions.

For a single part beside empty ones, like a cache that is still empty, Inductor makes a copy with the part's strides.
Eager's result is contiguous, and a `view` in the exported graph may rely on this.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._prims_common import suggest_memory_format

from aotc.compiler.capture.lifting.mutations import written_values
from aotc.compiler.patches.shared.decompositions import decomposed


@contextmanager
def written_parts_are_copied() -> Iterator[None]:
    """While active, tensors that the graph writes to are concatenated as copies."""
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


def single_parts_lie_as_in_eager() -> AbstractContextManager[None]:
    """While active, a concatenation with one part that is not empty has eager's strides."""
    return decomposed({torch.ops.aten.cat.default: _single_part})


def _single_part(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    parts = [part for part in tensors if not _is_known_as_empty(part, dim)]
    if len(parts) != 1:
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    formats = {suggest_memory_format(tensor) for tensor in tensors}  # ATen's compute_output_memory_format
    layout = formats.pop() if len(formats) == 1 else torch.contiguous_format
    return parts[0].to(dtype).clone(memory_format=layout)


def _is_known_as_empty(part: Tensor, dim: int) -> bool:
    """The check of Inductor's own decomposition, whose rule is that of `torch.cat`."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    axis = 0 if part.dim() == 1 else dim
    return part.dim() > 0 and guard_or_false(part.shape[axis] == 0)


def _written(node: fx.Node) -> list[fx.Node]:
    """The values that a node of the graph writes to in place; for a Triton kernel, all its inputs."""
    if node.target is torch.ops.higher_order.triton_kernel_wrapper_mutation:
        return node.all_input_nodes
    return written_values(node)
