"""Parts of a graph: consecutive operators as graphs of their own; values and gradients in eager and in float64."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from aotc.models.float64_reference import in_double, in_float64
from aotc.models.gradients import is_differentiable

_CONVERT = torch.ops.prims.convert_element_type.default
_COPY = torch.ops.aten._to_copy.default
_DETACH = torch.ops.aten.detach.default


@dataclass(frozen=True)
class Part:
    """A graph with the inputs that it has within a run of the whole in eager. `nodes` are the names of its operators in
    the whole; the graph returns a tuple, of which `outputs` are the names. `trained` are the places of the inputs whose
    gradients count as its results, too."""

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    nodes: tuple[str, ...]
    outputs: tuple[str, ...]
    trained: tuple[int, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """The names of all that counts: outputs, then gradients."""
        inputs = [node.name for node in self.graph.graph.find_nodes(op="placeholder")]
        return (*self.outputs, *(f"{OF}{inputs[place]}" for place in self.trained))


OF = "the gradient of "


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


def in_eager(part: Part) -> list[Any]:
    """The part's results in eager."""

    def run(given: Sequence[Any]) -> Any:
        return fx.Interpreter(part.graph).run(*given, enable_io_processing=False)

    return results_of(run, [_copied(value) for value in part.inputs], part.trained)


def exact(part: Part) -> list[Any]:
    """The part's results in float64; those of eager where it cannot run so."""

    def run(given: Sequence[Any]) -> Any:
        return _Recorder(part.graph).run(*given, enable_io_processing=False)

    try:
        with in_float64():
            return results_of(run, [in_double(_copied(value)) for value in part.inputs], part.trained)
    except Exception:  # its operators may raise anything
        return in_eager(part)


def results_of(call: Callable[[list[Any]], Any], inputs: list[Any], trained: Sequence[int]) -> list[Any]:
    """What a call gives, and the gradients of the inputs `trained`, zeros where there is none: those of the sum of all
    outputs, each weighted by random numbers that depend on its place only."""
    torch.manual_seed(0)
    if not trained:
        with torch.no_grad():
            return _flat(call(inputs))
    of = [inputs[place].requires_grad_() for place in trained]
    with torch.enable_grad():
        outputs = _flat(call(inputs))
        given = [(each, _weights(each, place)) for place, each in enumerate(outputs) if is_differentiable(each)]
        roots, weights = [root for root, _ in given], [weight for _, weight in given]
        gradients = (
            torch.autograd.grad(roots, of, weights, materialize_grads=True) if given else map(torch.zeros_like, of)
        )
    return [each.detach() if isinstance(each, Tensor) else each for each in (*outputs, *gradients)]


def _weights(of: Tensor, place: int) -> Tensor:
    drawn = torch.randn(of.shape, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
    return drawn.to(of.device, of.dtype)


def trained_in(graph: fx.GraphModule, wanted: Collection[fx.Node]) -> frozenset[str]:
    """The names of the nodes through which gradients come to the inputs `wanted`."""
    found = set(wanted)
    for node in graph.graph.nodes:
        follows = node.op == "call_function" and node.target is not _DETACH
        if follows and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(node.name for node in found)


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


def part_of(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], values: Mapping[str, Any], trained: Collection[str] = ()
) -> Part:
    """These nodes as a graph. What they take from others are its inputs, with `values`, and, of those named in
    `trained`, gradients; what others take from them, or nothing does, are its outputs."""
    new, made, own = fx.Graph(), {}, set(nodes)
    inputs: list[Any] = []
    places: list[int] = []

    def given(node: fx.Node) -> fx.Node:
        if node not in made:
            if node.op == "get_attr":
                made[node] = new.node_copy(node)
            else:
                made[node] = new.placeholder(node.name)
                if node.name in trained and _is_float(values[node.name]):
                    places.append(len(inputs))
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
    names, outputs = tuple(node.name for node in nodes), tuple(node.name for node in ends)
    return Part(module, tuple(inputs), names, outputs, tuple(places))


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


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _flat(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
