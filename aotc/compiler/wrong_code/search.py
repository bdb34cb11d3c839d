"""The smallest part of a graph whose results differ: first the shortest beginning that differs, then its shortest end.

Each part is given what eager computes before it, so an error does not come from elsewhere.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from aotc.compiler.explain_failure import lines_shown
from aotc.compiler.wrong_code.bisection_records import Culprit, WorstElement
from aotc.compiler.wrong_code.lowering import Lowering, LoweringStep
from aotc.compiler.wrong_code.subgraphs import OF, Part, exact, groups_of, in_eager, needed_for, part_of, values_of
from aotc.compiler.wrong_code.trials import BudgetSpent, Ended, in_fork
from aotc.models.decided_values import first_wrong_value
from aotc.models.tolerance import Judgement, failed, judge

LONGEST = 400
"""Characters of a text of torch's."""
SEARCH_ENDED = "or of a part of these: the CPU time of the search is spent"


class FaultyPart(NamedTuple):
    """A part whose results are wrong: the one that is, its verdict, and the numbers of its worst element. `is_least`:
    no smaller part is wrong, as far as is known; False where the budget ended the search."""

    part: Part
    output: str
    judgement: Judgement
    numbers: WorstElement | None
    is_least: bool = True


def difference(lowering: Lowering, step: LoweringStep, part: Part) -> FaultyPart | None:
    """How the part's results differ from eager's after a step of the compiler; None where they are right.

    Raises BudgetSpent, and what torch's compiler does; of a part that is tried in a fork, RuntimeError.
    """
    lowering.budget.check()
    if not lowering.crashes:
        return _difference(lowering, step, part)

    def judged() -> tuple[Any, ...] | None:
        found = _difference(lowering, step, part)
        return found and (found.output, found.judgement, found.numbers)

    found = in_fork(judged)
    if isinstance(found, Ended):
        return FaultyPart(part, part.outputs[-1], failed(f"the process {found.how}"), None)
    return found and FaultyPart(part, *found)


def _difference(lowering: Lowering, step: LoweringStep, part: Part) -> FaultyPart | None:
    if lowering.extremes:
        return _difference_at_extremes(lowering, step, part)
    eager, reference = in_eager(part), exact(part)
    found = lowering.run(step, part)
    judged = [
        FaultyPart(part, name, _judge(mine, theirs, wide), numbers_of(mine, theirs, wide))
        for name, mine, theirs, wide in zip(part.results, found, eager, reference, strict=True)
    ]
    wrong = [one for one in judged if not one.judgement.ok]
    return max(wrong, key=lambda one: one.judgement.error / (one.judgement.allowed or 1.0), default=None)


def _difference_at_extremes(lowering: Lowering, step: LoweringStep, part: Part) -> FaultyPart | None:
    eager, found = in_eager(part), lowering.run(step, part)

    def call(inputs: Sequence[Any]) -> list[Any]:
        return in_eager(replace(part, inputs=tuple(inputs)))

    wrong = first_wrong_value(eager, found, call, part.inputs)
    return wrong and FaultyPart(part, part.results[wrong.position], failed(wrong.said), None)


def smallest(
    lowering: Lowering, step: LoweringStep, graph: fx.GraphModule, inputs: Sequence[Any], trained: Collection[str] = ()
) -> FaultyPart | None:
    """The smallest part of the graph that differs after a step of the compiler, or of those that were tried until the
    budget was spent; None where none does by itself. `trained` names the nodes whose gradients count, too."""
    _, values = values_of(graph, inputs)
    groups = groups_of(graph)

    tried: dict[tuple[fx.Node, ...], FaultyPart | None] = {}

    def differs(nodes: Sequence[fx.Node]) -> FaultyPart | None:
        if (key := tuple(nodes)) not in tried:
            try:
                tried[key] = difference(lowering, step, part_of(graph, nodes, values, trained))
            except BudgetSpent:
                raise
            except Exception:  # a part that cannot be compiled by itself says nothing
                tried[key] = None
        return tried[key]

    def of(begin: int, end: int) -> list[fx.Node]:
        return [node for group in groups[begin:end] for node in group]

    try:
        return _smallest(differs, of, len(groups))
    except BudgetSpent:
        wrong = [each for each in tried.values() if each]
        least = min(wrong, key=lambda each: len(each.part.nodes), default=None)
        return least and least._replace(is_least=False)


def _smallest(
    differs: Callable[[Sequence[fx.Node]], FaultyPart | None], of: Callable[[int, int], list[fx.Node]], groups: int
) -> FaultyPart | None:
    found = differs(of(0, groups))
    if found is None:
        return None
    end = _least(1, groups, lambda end: differs(of(0, end)) is not None)
    begin = end - 1 - _least(0, end - 1, lambda before: differs(of(end - 1 - before, end)) is not None)
    found = differs(of(begin, end)) or found
    if found.output.startswith(OF):  # of all outputs
        return found
    needed = needed_for(of(begin, end), [found.output])
    return differs(needed) or found if len(needed) < len(found.part.nodes) else found


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number from `low` to `high` for which a monotone condition holds; it is known to hold for `high`."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


# -- what is said of it -----------------------------------------------------------------------------------------------


def culprit_of(found: FaultyPart, graph: fx.GraphModule) -> Culprit:
    """The part in the words of the model: its operators, line and submodule."""
    by_name = {node.name: node for node in graph.graph.nodes}
    nodes = [by_name[name] for name in found.part.nodes]
    operators = [node for node in nodes if not str(node.target).startswith("<built-in function getitem")]
    is_gradient = found.output.startswith(OF)
    last = by_name[found.part.nodes[-1] if is_gradient else found.output]
    notes = [found.output] * is_gradient + [SEARCH_ENDED] * (not found.is_least)
    return Culprit(
        kind="operator" if len(operators) == 1 else "region",
        names=tuple(operator_name(node) for node in operators),
        line=line_of(last),
        module=module_of(last),
        inputs=tuple(shown_shape(value) for value in found.part.inputs if isinstance(value, Tensor)),
        numbers=found.numbers,
        detail=found.judgement.detail,
        note="; ".join(notes),
    )


def operator_name(node: fx.Node) -> str:
    """The operator of a node, with the one of the model that it was decomposed from."""
    own, original = str(node.target), str(node.meta.get("original_aten", ""))
    return own if original in ("", "None", own) else f"{own} of {original}"


def line_of(node: fx.Node) -> str:
    """The model's line of a node."""
    stack = str(node.meta.get("stack_trace") or "")
    frames = [
        traceback.FrameSummary(file, int(number), name)
        for file, number, name in re.findall(r'File "([^"]+)", line (\d+), in (\w+)', stack)
    ]
    return lines_shown(frames)


def module_of(node: fx.Node) -> str:
    """The path of the submodule that a node is of."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    return str(modules[-1][0]) if modules else ""


def shown_shape(value: Tensor) -> str:
    """`float32[2, 3]`."""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


# -- judging ----------------------------------------------------------------------------------------------------------


def _judge(mine: Any, theirs: Any, wide: Any) -> Judgement:
    if not isinstance(theirs, Tensor):
        return Judgement(True, 0.0, 0.0, 0.0) if mine == theirs else failed(f"{mine!r}, and {theirs!r} in eager")
    if not isinstance(mine, Tensor):
        return failed(f"{type(mine).__name__} in the place of a tensor")
    return judge(mine, theirs, wide if isinstance(wide, Tensor) else theirs)


def numbers_of(mine: Any, theirs: Any, wide: Any) -> WorstElement | None:
    """The numbers of the element that differs most from `wide`; None if there is no such element."""
    tensors = (mine, theirs, wide)
    if not all(isinstance(one, Tensor) for one in tensors) or mine.shape != theirs.shape or not mine.numel():
        return None
    if mine.is_complex() or mine.is_quantized or mine.layout != torch.strided:
        return None
    mine, theirs, wide = (one.detach().cpu().double() for one in tensors)
    wide = wide if wide.shape == theirs.shape else theirs
    error = torch.nan_to_num((mine - wide).abs(), nan=float("inf"), posinf=float("inf"))
    place = torch.unravel_index(error.flatten().argmax(), error.shape) if error.dim() else ()
    index = tuple(int(one) for one in place)
    return WorstElement(index, float(mine[index]), float(theirs[index]), float(wide[index]))
