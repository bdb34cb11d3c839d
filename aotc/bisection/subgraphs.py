"""Parts of a graph: consecutive operators as graphs of their own, and every value in eager and in float64."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from aotc.verify.reference import in_float64

_CONVERT = torch.ops.prims.convert_element_type.default
_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Part:
    """A graph with the inputs that it has within a run of the whole in eager. `nodes` are the names of its operators in
    the whole; the graph returns a tuple, of which `outputs` are the names."""

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    nodes: tuple[str, ...]
    outputs: tuple[str, ...]


class _Recorder(fx.Interpreter):
    """Keeps the value of every node, as it is when the node has run: later ones may write to it."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = fx.node.map_aggregate(value, _copied) if n.op != "output" else value
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            target is _CONVERT
        ):  # what a model casts is rounded in float64, too: the reference knows the operator of aten
            return _COPY(args[0], dtype=args[1])
        return super().call_function(target, args, kwargs)


def values_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The outputs of a graph in eager, and the value of each node by its name. `inputs` are left as they are."""
    recorder = _Recorder(graph)
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = recorder.run(*map(_copied, inputs), enable_io_processing=False)
    return _flat(outputs), recorder.values


def exact(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a graph in float64; those of eager where it cannot run so."""
    torch.manual_seed(0)
    try:
        with torch.no_grad(), in_float64():
            return _flat(_Recorder(graph).run(*map(_wide, inputs), enable_io_processing=False))
    except Exception:  # its operators may raise anything
        return values_of(graph, inputs)[0]


def groups_of(graph: fx.GraphModule) -> list[list[fx.Node]]:
    """The operators in their order, each with the nodes that take its result apart. Nodes that only check something,
    and writes to inputs, are in none."""
    groups: dict[str, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or not _computes(node):
            continue
        producer = node
        while producer.target is operator.getitem and isinstance(producer.args[0], fx.Node):
            producer = producer.args[0]
        groups.setdefault(producer.name, []).append(node)
    return list(groups.values())


def part_of(graph: fx.GraphModule, nodes: Sequence[fx.Node], values: Mapping[str, Any]) -> Part:
    """These nodes as a graph. What they take from others are its inputs, with `values`; what others take from them, or
    nothing does, are its outputs."""
    new, made, inputs, own = fx.Graph(), {}, [], set(nodes)

    def given(node: fx.Node) -> fx.Node:
        if node not in made:
            if node.op == "get_attr":
                made[node] = new.node_copy(node)
            else:
                made[node] = new.placeholder(node.name)
                inputs.append(values[node.name])
        return made[node]

    outside = [one for node in nodes for one in node.all_input_nodes if one not in own]
    for node in dict.fromkeys(outside):  # placeholders come first
        given(node)
    for node in nodes:
        made[node] = new.node_copy(node, given)
    ends = [node for node in nodes if _is_tensor(values[node.name]) and not own.issuperset(node.users)]
    ends = ends or [node for node in nodes if _is_tensor(values[node.name])][-1:]
    new.output(tuple(made[node] for node in ends))
    module = fx.GraphModule(graph, new)
    return Part(module, tuple(inputs), tuple(node.name for node in nodes), tuple(node.name for node in ends))


def needed_for(nodes: Sequence[fx.Node], wanted: Sequence[str]) -> list[fx.Node]:
    """Those of the nodes from which the values `wanted` are computed."""
    needed: set[fx.Node] = set()
    pending = [node for node in nodes if node.name in wanted]
    own = set(nodes)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += [one for one in node.all_input_nodes if one in own]
    return [node for node in nodes if node in needed]


_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")


def _computes(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    if any(name.startswith(check) for check in _CHECKS) or not node.users:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or not schema.is_mutable


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().clone()
    return value.double() if value.is_floating_point() else value.to(torch.complex128) if value.is_complex() else value


def _flat(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
