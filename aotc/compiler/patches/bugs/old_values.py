"""What a model keeps of a tensor's old value, before it writes to the tensor.

Inductor takes a copy of an input for the input itself where nothing in the graph but its end writes to it. There the
new values are written in the order of the inputs: `previous.copy_(current); current.copy_(x)` then copies what was just
written. torch 2.15 keeps copies of what is written to (`remove_noop_ops` of its post_grad.py); so do these for others.

A tensor that nothing reads later is written to in its own memory: also where what is written, or the index, lies in
that memory, as in `x[index] = x[1:].clone()`, whose copy was left out. Then some rows are read when they are the new
ones. torch 2.15 has mended this, too (`should_reinplace_index_put` of its reinplace.py).

A part of a buffer is written in the buffer's own memory, also where that is not what the buffer becomes in the end, as
in `changed = self.total.select_scatter(x, 0, 1); self.total.copy_(y)`: what was returned as `changed` was `y`.

A tensor that is also copied to an input may be made in the memory of that input. Where the graph returned the tensor,
the input came back, and the next call changed the result. In eager the result is a tensor of its own, so a copy is
returned.

On a CPU a kernel that is given the loops of another, so that both be one, loses what it must come after. torch 2.13
keeps that, and torch 2.15 the names, too, that written tensors have since then (`recompute_size_and_body` of its
scheduler.py); so do all here. A tensor was written before another kernel read its old value.

Two kernels become one where the second writes each element that the first reads, and no other. What the first reads of
a tensor that was written to before has another name, and torch before 2.15 did not take it for the tensor: in
`s.diagonal().fill_(3); s[1:] = s[:-1].clone()` rows were read when they were the new ones (`fusable_weak_dep` there).
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
    """Within, no copy of a tensor that the graph writes to is taken for that tensor."""
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
    """Operators that write a part of a tensor, and are computed in its memory."""
    from torch._inductor.fx_passes import reinplace

    aten = torch.ops.aten
    return aten.index_put.default, aten._unsafe_index_put.default, reinplace._generalized_scatter


@contextmanager
def reads_are_not_written_over() -> Iterator[None]:
    """Within, an operator that writes a part of a tensor does so in other memory, where it reads that memory, or where
    the tensor gets other values while its result is needed."""
    from torch._inductor.fx_passes import reinplace
    from torch._inductor.fx_utils import get_node_storage as storage_of

    writing = _writing()

    def reads_elsewhere(node: Any) -> bool:
        written, *read = node.args
        values = [value for value in pytree.tree_leaves((read, node.kwargs)) if isinstance(value, fx.Node)]
        return storage_of(written) not in {storage_of(value) for value in values}

    def gone_before_next_write(node: Any) -> bool:
        """Whether nothing reads the result, or a view of it, after other values are copied to where it would lie."""
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
    """Within, what the graph returns is not made in the memory of an input that it is copied to."""
    from torch._inductor.fx_passes import reinplace

    reinplace_core = reinplace.reinplace_inplaceable_ops_core

    def reinplace_what_is_not_returned(graph: fx.Graph) -> None:
        _return_copies(graph)
        reinplace_core(graph)

    with mock.patch.object(reinplace, "reinplace_inplaceable_ops_core", reinplace_what_is_not_returned):
        yield


@contextmanager
def reordered_loops_keep_their_order() -> Iterator[None]:
    """Within, a kernel that is given the loops of another still comes after what it must come after."""
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
    """Within, a kernel is fused with one that writes what it reads only where both do so element by element."""
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
    """A value, and what it was before parts of it were written, and that before."""
    while isinstance(value, fx.Node):
        yield value
        value = value.args[0] if value.target in writing else None


def _return_copies(graph: fx.Graph) -> None:
    """Where the graph writes to an input, return copies of the tensors that may be made in the memory of an input, and
    copy those to other inputs.

    A copy is taken where the tensor has been computed, and once, so that outputs that share memory go on to share it.
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
