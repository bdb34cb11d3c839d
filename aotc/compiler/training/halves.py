"""From a captured graph to two: the forward, which also returns what the backward needs, and the backward.

AOTAutograd traces both in one joint graph, Inductor's passes over it decide random numbers once for both, and the
min-cut partitioner decides what is saved and what is computed again. So masks of dropout agree between the two.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.autograd.function import Function
from torch.autograd.graph import get_gradient_edge

from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.lifting.shared_memory import views_of
from aotc.compiler.explain_failure import line_named
from aotc.compiler.scoped import replaced
from aotc.compiler.training.backward_sizes import read_from_tensors, symbols_of
from aotc.errors import BuildError
from aotc.records import Argument, Backward, Gradient, Saved, Total

_clone = torch.ops.aten.clone.default
_copy = torch.ops.aten.copy_.default

LEAST_BUDGET = 1e-6
"""The share of activations that may be saved in a graph with random numbers, at least."""


class Halves(NamedTuple):
    """The two graphs of a training step.

    `forward` is the capture with the forward's graph, whose outputs are the model's `results` and then those that only
    the backward takes. `backward` is in the form of a capture, of which nothing but the graph and the examples counts.
    It takes tensors as `saved` says, and returns the `gradients`. For `held` and `without` see `aotc.records.Backward`.
    """

    forward: Capture
    backward: Capture
    results: int
    saved: tuple[Saved, ...]
    gradients: tuple[Gradient, ...]
    held: tuple[Saved, ...]
    without: tuple[Argument, ...]
    totals: tuple[Total, ...] = ()

    @property
    def differentiable(self) -> tuple[int, ...]:
        return tuple(sorted({each.gradient for each in self.saved if each.gradient is not None}))

    def record(self, library: str) -> Backward:
        return Backward(
            library,
            results=self.results,
            differentiable=self.differentiable,
            saved=self.saved,
            gradients=self.gradients,
            held=self.held,
            without=self.without,
            totals=self.totals,
        )


def halves_of(captured: Capture, differentiable: Sequence[Argument], memory_budget: float) -> Halves:
    """Split a captured model into its forward and its backward.

    differentiable: the graph's arguments that get gradients.
    memory_budget: torch's `activation_memory_budget`, from 0 (save the inputs, compute all again) to 1.

    Raises BuildError where no result depends on any of `differentiable`, or one of them is written to.
    """
    return _Splitting(captured, differentiable).split(memory_budget)


class _Whole(nn.Module):
    """The graph as a module that takes all its tensors except constants as arguments."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *arguments: Any) -> Any:
        return self.graph(*arguments)


class _Mark(Function):
    """An identity operator of `value`; `mark`, too, gets the whole gradient of the result."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, mark: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


def _marked(value: Tensor, mark: Tensor) -> Tensor:
    return cast(Tensor, _Mark.apply(value, mark))  # type: ignore[no-untyped-call]


def _zeros(size: Sequence[Any], **options: Any) -> Tensor:
    """Materialise lazy zeros: they have no memory, and compiled code would read it."""
    return torch.zeros(size, **options)


class _Dependence(NamedTuple):
    """The results that depend on each argument, and on each other result."""

    of_arguments: dict[int, set[int]]
    of_results: dict[int, set[int]]

    def results_of(self, argument: int, differentiable: Collection[int]) -> tuple[int, ...]:
        """Empty where all do."""
        own = self.of_arguments.get(argument, set()) & set(differentiable)
        return () if own == set(differentiable) else tuple(sorted(own))


class _Splitting:
    def __init__(self, captured: Capture, differentiable: Sequence[Argument]) -> None:
        self.captured = captured
        self.arguments, self.differentiable = captured.arguments, differentiable
        self.mode = _mode_of(captured.graph.graph)
        self.wanted = {index for index, each in enumerate(captured.arguments) if each in differentiable}

    def split(self, memory_budget: float) -> Halves:
        from torch._functorch import config

        self._check_written()
        results = self._separate_results()
        with ExitStack() as stack:
            # Halves are traced again when they are compiled: their casts are in the graphs already.
            stack.enter_context(config.patch(backward_pass_autocast="off"))
            dependence = self._dependence(results)
            self._mark(dependence)
            joint = self._joint(stack)
            outputs = joint.graph.output_node()
            kinds = [type(desc).__name__ for desc in outputs.meta["desc"]]
            written = [
                self._position(desc.mutated_input)
                for desc in outputs.meta["desc"]
                if type(desc).__name__ == "InputMutationAOTOutput"
            ]
            count = len(written) + results
            if kinds[:count] != ["InputMutationAOTOutput"] * len(written) + ["PlainAOTOutput"] * results:
                _raise_if_checked(joint.graph, self.captured.graph.graph)
                raise BuildError(
                    "the model's results share memory in a way that its backward cannot be compiled for",
                    hint="return copies: `x.clone()`",
                    stage="export",
                )
            self._check_differentiable(kinds)
            forward, backward = self._partition(joint, count, memory_budget)
        return self._finish(forward, backward, written, results, dependence)

    def _separate_results(self) -> int:
        """Let each result of the graph have memory of its own. Returns their number."""
        graph = self.captured.graph.graph
        output = graph.output_node()
        values = list(cast("tuple[fx.Node, ...]", output.args[0]))
        _own_memory(graph, values)
        output.args = (tuple(values),)
        self.captured.graph.recompile()
        return len(values)

    def _joint(self, stack: ExitStack) -> fx.GraphModule:
        from torch._decomp import decompositions
        from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
        from torch._guards import TracingContext, tracing
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.virtualized import V

        # The other one, oneDNN's, has no backward here; torch takes it unless the layer's input requires a gradient.
        unrolled = replaced(decompositions, "select_one_layer_lstm_function", lambda *_: decompositions.one_layer_lstm)
        stack.enter_context(unrolled)
        stack.enter_context(V.set_fake_mode(self.mode))
        stack.enter_context(tracing(TracingContext(self.mode)))
        inputs = self.captured.graph.graph.find_nodes(op="placeholder")
        symbols = symbols_of(inputs)
        with torch.enable_grad():
            joint = aot_export_joint_with_descriptors(
                stack,
                _Whole(self.captured.graph),
                tuple(self._fakes()),
                decompositions={**select_decomp_table(), torch.ops.aten._efficientzerotensor.default: _zeros},
            )
        if symbols - symbols_of(inputs):
            raise BuildError(
                "the backward can be compiled at one size of a range only",
                hint="give the dims of this model fixed sizes in each bucket",
                stage="export",
            )
        module = joint.graph_module
        for node in module.graph.find_nodes(op="placeholder"):
            if self._position(node.meta["desc"]) >= len(self.arguments):  # a mark
                module.graph.erase_node(node)
        return module

    def _fakes(self) -> list[Tensor]:
        """Tensors without memory for all placeholders: arguments, then marks."""
        with self.mode:
            return [
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).requires_grad_(
                    index in self.wanted or index >= len(self.arguments)
                )
                for index, value in enumerate(_values(self.captured.graph.graph))
            ]

    def _dependence(self, results: int) -> _Dependence:
        """Computed from eager's autograd graph. With a single result, everything depends on it."""
        of_arguments: dict[int, set[int]] = {}
        of_results: dict[int, set[int]] = {}
        if results == 1:
            return _Dependence(of_arguments, of_results)
        fakes = self._fakes()
        index_of = {id(fake): index for index, fake in enumerate(fakes)}
        # As torch traces: without its dispatcher in Python, composite operators of torch 2.11 fix the sizes of a range.
        with self.mode, torch.enable_grad(), enable_python_dispatcher():
            values = self.captured.graph(*fakes)
        edges = {_edge_of(value): place for place, value in enumerate(values) if value.requires_grad}
        for edge, place in edges.items():
            leaves, passed = _reached(edge)
            for leaf in leaves:
                of_arguments.setdefault(index_of[id(leaf)], set()).add(place)
            for other in passed & edges.keys():
                of_results.setdefault(edges[other], set()).add(place)
        return _Dependence(of_arguments, of_results)

    def _mark(self, dependence: _Dependence) -> None:
        """Make the joint graph compute the whole gradient of each result on which others depend: as the gradient of a
        mark."""
        graph = self.captured.graph.graph
        values = list(cast("tuple[fx.Node, ...]", graph.output_node().args[0]))
        self.marked = sorted(dependence.of_results)
        last = graph.find_nodes(op="placeholder")[-1]
        for number, place in enumerate(self.marked):
            value = values[place]
            with graph.inserting_after(last):
                last = graph.placeholder(f"mark_{number}")
            with graph.inserting_after(value):
                marked = graph.call_function(_marked, (value, last))
            marked.meta, last.meta = dict(value.meta), dict(value.meta)
            value.replace_all_uses_with(marked, partial(operator.is_not, marked))
        self.captured.graph.recompile()

    def _position(self, desc: Any) -> int:
        """The argument of a description; -1 for a constant of the graph."""
        return desc.idx if type(desc).__name__ == "PlainAOTInput" else -1

    def _check_written(self) -> None:
        leaves, state = self.captured.mutated_leaves, self.captured.mutated_state
        written = [index for index in self.wanted if self.arguments[index].leaf in leaves]
        written += [index for index in self.wanted if self.arguments[index].state in state]
        if written:
            raise BuildError(
                f"forward writes to `{self._name(written[0])}`, which gets a gradient: its backward cannot be compiled",
                hint="let forward compute a new tensor",
                stage="export",
            )

    def _check_differentiable(self, kinds: Sequence[str]) -> None:
        if not any(kind.startswith("Grad") for kind in kinds):
            raise BuildError(
                "nothing of the model can be trained: no result depends on a parameter or an input that requires a "
                "gradient",
                hint="leave out `train: true`; or let an input have `requires_grad: true`, and see that the factory "
                "freezes not all parameters",
                stage="export",
            )

    def _name(self, index: int) -> str:
        argument = self.arguments[index]
        return argument.state or f"input {argument.leaf}"

    def _partition(
        self, joint: fx.GraphModule, count: int, memory_budget: float
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch import config
        from torch._inductor import config as inductor_config
        from torch._inductor.compile_fx import partition_fn

        self.sources = {node.name: node.meta["desc"] for node in joint.graph.find_nodes(op="placeholder")}
        self.gradients = joint.graph.output_node().meta["desc"][count:]
        if any(map(draws, joint.graph.nodes)):  # with 0, torch computes all again, and draws other numbers
            memory_budget = max(memory_budget, LEAST_BUDGET)
        with (
            config.patch(activation_memory_budget=memory_budget),
            inductor_config.patch(joint_custom_post_pass=_save_what_is_drawn),
        ):
            forward, backward = partition_fn(
                joint, _values(joint.graph), num_fwd_outputs=count, static_lifetime_input_indices=list(self._static())
            )
        drawn = {node.name for node in forward.graph.nodes if draws(node)}
        if again := [node for node in backward.graph.nodes if node.name in drawn and draws(node)]:
            raise BuildError(
                f"the backward would draw random numbers again, and others than the forward: {again[0].target}",
                hint="leave out `activation_memory`, or the option `fallback_random`",
                stage="export",
            )
        return forward, backward

    def _static(self) -> Collection[int]:
        """Parameters and buffers, which stay in memory whether they are saved or not."""
        places = [desc for name, desc in self.sources.items() if not name.startswith("tangents")]
        return [
            place
            for place, desc in enumerate(places)
            if (index := self._position(desc)) < 0 or self.arguments[index].state is not None
        ]

    # -- after the partition ------------------------------------------------------------------------------------------

    def _finish(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        written: Sequence[int],
        results: int,
        dependence: _Dependence,
    ) -> Halves:
        inputs = {node.name: node for node in forward.graph.find_nodes(op="placeholder")}
        output = forward.graph.output_node()
        values = list(cast("Sequence[fx.Node]", output.args[0]))
        returned = values[len(written) : len(written) + results]
        before = self._before_writes(forward, written, inputs)
        self._take_gradients_laid_out(backward, returned)
        passed = list(backward.graph.find_nodes(op="placeholder"))
        saved_values = values[len(written) + results :]
        by_name = {node.name: node for node in saved_values if isinstance(node, fx.Node)}
        self._write(forward, written, values, inputs)

        numbers = [node for node in passed if not isinstance(node.meta.get("val"), Tensor)]
        if numbers:
            missing = symbols_of(numbers) - symbols_of([node for node in passed if node not in numbers])
            passed += self._pass_more(backward, missing, inputs, by_name)
            read_from_tensors(backward.graph, numbers)
            passed = [node for node in passed if node not in numbers]

        outputs = list(returned)
        saved: list[tuple[fx.Node, Saved]] = []
        held: list[Saved] = []
        for node in passed:
            source = self._source(node, by_name, inputs, outputs, before)
            if source is None:  # a constant
                self._bake(backward, node)
                continue
            saved.append((node, source))
        for _, source in saved:
            if source.output is not None:
                held += _sharing(outputs[source.output], returned, inputs, self._argument_of)
        output.args = (tuple(outputs),)
        for copy in before.values():
            if not copy.users:
                forward.graph.erase_node(copy)
        found = self._gradients(backward)
        gradients = [each for each in found if each.argument < len(self.arguments)]
        for node in list(inputs.values()):
            if self._position(self.sources[node.name]) < 0:
                self._bake(forward, node)
        used = {each.argument for each in (*(source for _, source in saved), *held)}
        used |= {each.argument for each in gradients}
        arguments, examples, places = self._keep_used(forward, used)
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()
        own = [source for _, source in saved]
        without = {each: None for each in self.differentiable if each.leaf is not None or each in arguments}
        for each in gradients:
            del without[self.arguments[each.argument]]
        state = [argument.state for argument in arguments if argument.state is not None]
        state += [each.state for each in self.captured.outputs if each.state is not None]
        differentiable = {each.gradient for each in own if each.gradient is not None}
        return Halves(
            replace(
                self.captured,
                graph=forward,
                examples=examples,
                arguments=arguments,
                state=tuple(dict.fromkeys(state)),
            ),
            replace(self.captured, graph=backward, examples=_values(backward.graph)),
            results,
            tuple(_placed(source, places) for source in own),
            tuple(
                Gradient(each.output, places[each.argument], dependence.results_of(each.argument, differentiable))
                for each in gradients
            ),
            tuple(_placed(each, places) for each in dict.fromkeys(held) if each not in own),
            tuple(without),
            self._totals(found, dependence, differentiable),
        )

    def _totals(
        self, found: Sequence[Gradient], dependence: _Dependence, differentiable: Collection[int]
    ) -> tuple[Total, ...]:
        outputs = {each.argument: each.output for each in found}
        totals = []
        for number, result in enumerate(self.marked):
            output = outputs.get(len(self.arguments) + number)
            of = dependence.of_results[result] & set(differentiable)
            if output is not None and of and result in differentiable:
                totals.append(Total(result, output, tuple(sorted(of))))
        return tuple(totals)

    def _take_gradients_laid_out(self, backward: fx.GraphModule, results: Sequence[fx.Node]) -> None:
        """Let the backward take the gradient of each result with the strides that `empty_like` of the result has, as
        it is called with; AOTAutograd may have traced another layout, which is copied to."""
        first = next(node for node in backward.graph.nodes if node.op != "placeholder")
        for node in backward.graph.find_nodes(op="placeholder"):
            desc = self.sources.get(node.name)
            if type(desc).__name__ != "TangentAOTInput":
                continue
            traced = node.meta["val"]
            with self.mode:
                given = torch.empty_like(results[cast(Any, desc).output.idx].meta["val"])
            if list(map(str, given.stride())) == list(map(str, traced.stride())):
                continue
            with backward.graph.inserting_before(first):
                copy = backward.graph.call_function(_clone, (node,), {"memory_format": torch.contiguous_format})
            node.replace_all_uses_with(copy, partial(operator.is_not, copy))
            copy.meta = {**node.meta, "val": traced.new_empty(traced.shape)}
            node.meta["val"] = given

    def _before_writes(
        self, forward: fx.GraphModule, written: Sequence[int], inputs: dict[str, fx.Node]
    ) -> dict[fx.Node, fx.Node]:
        """By each input that the forward writes to, a copy of its old value: the backward computes from it again what
        eager would save."""
        graph = forward.graph
        copies: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            for node in inputs.values():
                if self._argument_of(node) in written:
                    copies[node] = graph.call_function(_clone, (node,))
                    copies[node].meta = dict(node.meta)
        return copies

    def _write(
        self, forward: fx.GraphModule, written: Sequence[int], values: Sequence[fx.Node], inputs: dict[str, fx.Node]
    ) -> None:
        """Write new values of inputs and buffers into them, in place of returning them."""
        targets = {self._position(self.sources[name]): node for name, node in inputs.items()}
        output = forward.graph.output_node()
        for index, value in zip(written, values, strict=False):
            with forward.graph.inserting_before(output):
                copy = forward.graph.call_function(_copy, (targets[index], value))
            copy.meta["val"] = targets[index].meta["val"]

    def _pass_more(
        self, backward: fx.GraphModule, missing: set[Any], inputs: dict[str, fx.Node], by_name: dict[str, fx.Node]
    ) -> list[fx.Node]:
        """Let the backward take inputs for their sizes only."""
        more: list[fx.Node] = []
        first = next(iter(backward.graph.nodes))
        for node in inputs.values():
            own = symbols_of([node]) & missing
            if own and isinstance(node.meta.get("val"), Tensor):
                with backward.graph.inserting_before(first):
                    placeholder = backward.graph.placeholder(node.name)
                placeholder.meta = dict(node.meta)
                by_name[placeholder.name] = node
                self.sources[placeholder.name] = self.sources[node.name]
                more.append(placeholder)
                missing = missing - own
        return more

    def _source(
        self,
        node: fx.Node,
        by_name: dict[str, fx.Node],
        inputs: dict[str, fx.Node],
        outputs: list[fx.Node],
        before: dict[fx.Node, fx.Node],
    ) -> Saved | None:
        """Where the backward's placeholder comes from; a value that is saved becomes an output of the forward."""
        desc = self.sources.get(node.name)
        if type(desc).__name__ == "TangentAOTInput":
            return Saved(gradient=cast(Any, desc).output.idx)
        value = by_name.get(node.name) or inputs.get(node.name)
        if value is None:
            raise BuildError(
                f"the backward takes `{node.name}`, which the forward does not give",
                hint="an operator checks values in its backward, as torch.linalg.eig does, and torch compiles no such "
                "check there: leave it to eager, and compile the other parts with `regions`",
                stage="export",
            )
        value = before.get(value, value)
        if value.op == "placeholder":
            index = self._position(self.sources[value.name])
            return Saved(argument=index) if index >= 0 else None
        if value not in outputs:
            outputs.append(value)
        return Saved(output=outputs.index(value))

    def _argument_of(self, node: fx.Node) -> int:
        return self._position(self.sources[node.name])

    def _gradients(self, backward: fx.GraphModule) -> list[Gradient]:
        """The backward's outputs, each once and in memory of its own."""
        output = backward.graph.output_node()
        values = [
            (value, self._position(cast(Any, desc).grad_of))
            for value, desc in zip(cast("Sequence[Any]", output.args[0]), self.gradients, strict=True)
            if isinstance(value, fx.Node)
        ]
        distinct = list(dict.fromkeys(value for value, _ in values))
        separate = list(distinct)
        _own_memory(backward.graph, separate)
        output.args = (tuple(separate),)
        return [Gradient(distinct.index(value), index) for value, index in values]

    def _bake(self, module: fx.GraphModule, node: fx.Node) -> None:
        """Make a constant of the captured graph one of this graph again."""
        name = cast(Any, self.sources[node.name]).target.rpartition(".")[2]
        module.register_buffer(name, getattr(self.captured.graph, name))
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        module.graph.erase_node(node)

    def _keep_used(
        self, forward: fx.GraphModule, used: Collection[int | None]
    ) -> tuple[tuple[Argument, ...], tuple[Tensor, ...], dict[int, int]]:
        """Erase the forward's placeholders that neither half needs."""
        arguments: list[Argument] = []
        examples: list[Tensor] = []
        places: dict[int, int] = {}
        for node in forward.graph.find_nodes(op="placeholder"):
            index = self._argument_of(node)
            if not node.users and index not in used:
                forward.graph.erase_node(node)
                continue
            places[index] = len(arguments)
            arguments.append(self.arguments[index])
            examples.append(self.captured.examples[index])
        return tuple(arguments), tuple(examples), places


def draws(node: fx.Node) -> bool:
    """Whether the node draws random numbers, or seeds for them."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _save_what_is_drawn(graph: fx.Graph) -> None:
    """Keep the partitioner from drawing random numbers again in the backward, whatever the memory budget: seeds, or the
    numbers, are saved."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in graph.nodes:
        if draws(node) and isinstance(node.meta.get("val"), Tensor):  # torch saves no tuples
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _mode_of(graph: fx.Graph) -> Any:
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    return detect_fake_mode(_values(graph)) or FakeTensorMode()


_Edge = tuple[Any, int]


def _edge_of(value: Tensor) -> _Edge:
    edge = get_gradient_edge(value)
    return edge.node, edge.output_nr


def _reached(edge: _Edge) -> tuple[list[Tensor], set[_Edge]]:
    """The tensors to which a backward from this edge accumulates gradients, and the edges that it passes."""
    leaves: list[Tensor] = []
    waiting, passed = [edge], set[_Edge]()
    nodes = set()
    while waiting:
        node, _ = waiting.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        passed |= set(node.next_functions)
        waiting += node.next_functions
    return leaves, passed


def _values(graph: fx.Graph) -> tuple[Any, ...]:
    return tuple(node.meta["val"] for node in graph.find_nodes(op="placeholder"))


def _own_memory(graph: fx.Graph, values: list[fx.Node]) -> None:
    """Copy each value that is a view of an input, or shares memory with an earlier one."""
    roots: set[fx.Node] = set()
    for position, value in enumerate(values):
        root = _root(value)
        if root.op in ("placeholder", "get_attr") or root in roots:
            with graph.inserting_before(graph.output_node()):
                values[position] = graph.call_function(_clone, (value,))
            values[position].meta = dict(value.meta)
        roots.add(root)


def _root(node: fx.Node) -> fx.Node:
    """The value whose memory the node's is."""
    *_, root = views_of(node)
    return root


def _sharing(value: fx.Node, results: Sequence[fx.Node], inputs: dict[str, fx.Node], argument_of: Any) -> list[Saved]:
    """The results and the arguments that share memory with a saved value, so that a write to them is noticed."""
    root = _root(value)
    found = [Saved(output=index) for index, each in enumerate(results) if each is not value and _root(each) is root]
    if root.op == "placeholder" and root in inputs.values() and argument_of(root) >= 0:
        found.append(Saved(argument=argument_of(root)))
    return found


def _placed(source: Saved, places: dict[int, int]) -> Saved:
    return source if source.argument is None else Saved(argument=places[source.argument])


def _raise_if_checked(joint: fx.Graph, captured: fx.Graph) -> None:
    """Raises BuildError where an operator checks its result and may raise: torch orders such checks by tokens, which
    only a graph without a backward may have."""
    checks = joint.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)
    if not checks:
        return
    called = [str(next((each for each in node.args if isinstance(each, str)), node.args[1])) for node in checks]
    first = called[0].rpartition(".")[2]
    callers = (node.meta.get("stack_trace") or "" for node in captured.nodes if first in str(node.target))
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(called))
    raise BuildError(
        f"{names} may raise an error, depending on values, and torch compiles no backward of a graph that does",
        hint="call an operator that does not check: torch.linalg.solve_ex, inv_ex or cholesky_ex",
        stage="export",
        source=line_named(next(callers, "")),
    )
