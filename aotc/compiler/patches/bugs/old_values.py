"""Reads of a tensor's old value, before the model writes to the tensor.

Inductor replaces a copy of an input by the input itself if only the end of the graph writes to it. There new values are
written in the order of the inputs: `previous.copy_(current); current.copy_(x)` then copies the value just written.
torch 2.15 keeps copies of written tensors (`remove_noop_ops` of its post_grad.py); so do these patches for other
versions.

A tensor that is not read later is written to in place, even if the written value, or the index, is in the same memory,
as in `x[index] = x[1:].clone()`, whose copy was removed. Then some rows are read after they were overwritten. torch
2.15 has fixed this, too (`should_reinplace_index_put` of its reinplace.py).

A part of a buffer is written in the buffer's memory even if the result is not the buffer's final value, as in
`changed = self.total.select_scatter(x, 0, 1); self.total.copy_(y)`: `y` was returned as `changed`.

A tensor that is also copied to an input may be computed in the memory of that input. If the graph returned the tensor,
it returned the input, and the next call changed the result. In eager the result has its own memory, so a copy is
returned.

On a CPU, a kernel whose loops are reordered to fuse with another loses its ordering dependencies. torch 2.13 keeps
them, and torch 2.15 also the new names of written tensors (`recompute_size_and_body` of its scheduler.py); here all
versions do. Without them a tensor was written before another kernel read its old value.

Two kernels are fused if the second writes exactly the elements that the first reads. A tensor that was written to
before has another name in the first, and torch before 2.15 did not see that it is the same tensor: in
`s.diagonal().fill_(3); s[1:] = s[:-1].clone()` rows were read after they were overwritten (`fusable_weak_dep` there).
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree


@contextmanager
def copies_of_written_tensors_are_kept() -> Iterator[None]:
    """While active, a copy of a tensor that the graph writes to is not replaced by that tensor."""
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.fx_utils import get_node_storage as storage_of

    same_meta = post_grad.same_meta

    def interchangeable(node: fx.Node, source: fx.Node) -> bool:
        if not same_meta(node, source):
            return False
        storage = storage_of(source)
        if storage == storage_of(node):
            return True
        copies = source.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        return storage not in {storage_of(copy.args[0]) for copy in copies}

    with mock.patch.object(post_grad, "same_meta", interchangeable):
        yield


def _writing() -> tuple[Any, ...]:
    """Operators that write a part of a tensor, in its memory."""
    from torch._inductor.fx_passes import reinplace

    aten = torch.ops.aten
    return aten.index_put.default, aten._unsafe_index_put.default, reinplace._generalized_scatter


@contextmanager
def reads_are_not_written_over() -> Iterator[None]:
    """While active, an operator that writes a part of a tensor does so in new memory if it also reads the tensor's
    memory, or if the tensor gets other values while the operator's result is still needed."""
    from torch._inductor.fx_passes import reinplace
    from torch._inductor.fx_utils import get_node_storage as storage_of

    writing = _writing()

    def reads_elsewhere(node: Any) -> bool:
        written, *read = node.args
        values = [value for value in pytree.tree_leaves((read, node.kwargs)) if isinstance(value, fx.Node)]
        return storage_of(written) not in {storage_of(value) for value in values}

    def gone_before_next_write(node: Any) -> bool:
        """Whether the result and its views are not read after other values are copied to their memory."""
        written, values = node.args[0], [node]
        for value in values:
            values += [user for user in value.users if user not in values and storage_of(user) == storage_of(node)]
        positions = {each: position for position, each in enumerate(node.graph.nodes)}
        last = max((positions[user] for value in values for user in value.users), default=0)
        return not any(
            user.target is torch.ops.aten.copy_.default
            and user.args[0] is written
            and positions[user] < last
            and node not in _written_over(user.args[1], writing)
            for user in written.users
        )

    def in_place(known: Any) -> Any:
        return dataclasses.replace(
            known,
            extra_check=lambda node: reads_elsewhere(node) and gone_before_next_write(node) and known.extra_check(node),
        )

    operators = {target: in_place(reinplace.inplaceable_ops[target]) for target in writing}
    with mock.patch.dict(reinplace.inplaceable_ops, operators):
        yield


@contextmanager
def results_are_not_inputs() -> Iterator[None]:
    """While active, results of the graph are not computed in the memory of an input to which they are copied."""
    from torch._inductor.fx_passes import reinplace

    reinplace_core = reinplace.reinplace_inplaceable_ops_core

    def reinplace_what_is_not_returned(graph: fx.Graph) -> None:
        _return_copies(graph)
        reinplace_core(graph)

    with mock.patch.object(reinplace, "reinplace_inplaceable_ops_core", reinplace_what_is_not_returned):
        yield


@contextmanager
def reordered_loops_keep_their_order() -> Iterator[None]:
    """While active, a kernel whose loops are reordered keeps its ordering dependencies."""
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    recompute = SchedulerNode.recompute_size_and_body

    def recompute_in_order(node: Any, *args: Any, **kwargs: Any) -> None:
        after = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, WeakDep | StarDep))
        recompute(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.with_read(after).rename(node.mutation_renames))

    with mock.patch.object(SchedulerNode, "recompute_size_and_body", recompute_in_order):
        yield


@contextmanager
def kernels_fuse_with_reads_of_the_same_elements() -> Iterator[None]:
    """While active, a kernel is fused with one that writes its inputs only if both access the same elements in
    order."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.scheduler import ForeachKernelSchedulerNode, Scheduler

    fusable = Scheduler.fusable_weak_dep

    def fusable_in_memory(scheduler: Any, after: Any, reading: Any, writing: Any) -> bool:
        if not fusable(scheduler, after, reading, writing):
            return False
        names = scheduler.mutation_real_name
        (write,) = (dep for dep in writing.read_writes.writes if dep.name == after.mutating_buf)
        parts = reading.snodes if isinstance(reading, ForeachKernelSchedulerNode) else [reading]
        reads = [
            [dep for dep in part.read_writes.reads if names.get(dep.name, dep.name) == names[after.mutating_buf]]
            for part in parts
        ]
        return (
            set(write.var_names) <= write.index.free_symbols  # no element is written twice
            and sum(map(bool, reads)) <= 1
            and all(
                isinstance(dep, MemoryDep) and (dep.index, dep.size) == (write.index, write.size)
                for dep in itertools.chain(*reads)
            )
        )

    with mock.patch.object(Scheduler, "fusable_weak_dep", fusable_in_memory):
        yield


def _written_over(value: Any, writing: Container[Any]) -> Iterator[fx.Node]:
    """A value, then its versions before each write to a part of it, newest first."""
    while isinstance(value, fx.Node):
        yield value
        value = value.args[0] if value.target in writing else None


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
