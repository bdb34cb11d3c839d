"""The steps from an exported program to compiled code, up to the first wrong one; then the least part that differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from torch import fx

from aotc.compiler.wrong_code.bisection_records import CompileStage, Culprit, Remedy
from aotc.compiler.wrong_code.lowering import Lowering, LoweringStep
from aotc.compiler.wrong_code.remedies import remedies, where_decomposed
from aotc.compiler.wrong_code.search import FaultyPart, culprit_of, difference, smallest
from aotc.compiler.wrong_code.subgraphs import Part, trained_in

DECOMPOSED = "decomposed graph in eager"
LOWERED = "lowered by Inductor"


class Walk(NamedTuple):
    """The steps that were tried, the last one being the first wrong one, if any is."""

    stages: tuple[CompileStage, ...]
    culprit: Culprit | None = None
    remedies: tuple[Remedy, ...] = ()


def walk(lowering: Lowering, graph: fx.GraphModule, inputs: Sequence[Any], wanted: Sequence[int] = ()) -> Walk:
    """Decompose the graph and run it in eager, then let Inductor compile it, and compare with the graph in eager: its
    outputs, and the gradients of the inputs at the places `wanted`."""
    stages: list[CompileStage] = []
    steps: tuple[tuple[LoweringStep, str], ...] = (("decomposed", DECOMPOSED), ("lowered", LOWERED))
    for step, name in steps:
        whole = whole_of(graph, inputs, wanted)
        try:
            found = difference(lowering, step, whole)
        except Exception as error:
            first, *_ = str(error).strip().splitlines() or [type(error).__name__]
            stages.append(CompileStage(name, "failed", f"{type(error).__name__}: {first[:300]}"))
            return Walk(tuple(stages))
        if found is None:
            stages.append(CompileStage(name, "right"))
            continue
        stages.append(CompileStage(name, "wrong", found.judgement.detail))
        if step == "lowered" and not wanted:
            graph, inputs = lowering.decomposed(graph, inputs)
            whole = whole_of(graph, inputs)
        return _explained(lowering, step, graph, inputs, whole, stages)
    return Walk(tuple(stages))


def _explained(
    lowering: Lowering,
    step: LoweringStep,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    whole: Part,
    stages: Sequence[CompileStage],
) -> Walk:
    placeholders = graph.graph.find_nodes(op="placeholder")
    trained = trained_in(graph, [placeholders[place] for place in whole.trained])
    found: FaultyPart | None = smallest(lowering, step, graph, inputs, trained)
    if found is None:  # it does not differ by itself; whole, it does
        return Walk(tuple(stages), None, tuple(remedies(lowering, step, whole, whole)))
    culprit = culprit_of(found, graph)
    if step == "decomposed" and not whole.trained:
        culprit = msgspec.structs.replace(culprit, note=where_decomposed(found.part))
    return Walk(tuple(stages), culprit, tuple(remedies(lowering, step, found.part, whole)))


def whole_of(graph: fx.GraphModule, inputs: Sequence[Any], wanted: Sequence[int] = ()) -> Part:
    """The graph as a part of itself."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    returned = output.args[0] if isinstance(output.args[0], tuple | list) else [output.args[0]]
    names = tuple(getattr(node, "name", str(node)) for node in returned)
    nodes = tuple(node.name for node in graph.graph.nodes if node.op == "call_function")
    return Part(graph, tuple(inputs), nodes, names, tuple(wanted))
