"""Find the first operator at which an exported program diverges from eager.

Every value of the exported program is looked for among the values of eager. From the results that eager does not have,
the search goes back through values that it does not have, to an operator whose inputs it has.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from aotc.compiler.explain_failure import lines_shown
from aotc.compiler.wrong_code.bisection_records import Culprit
from aotc.compiler.wrong_code.search import line_of, module_of, operator_name, shown_shape
from aotc.compiler.wrong_code.subgraphs import values_of
from aotc.tensors.rounding import REPEATED, difference


def first_divergence(graph: fx.GraphModule, inputs: Sequence[Any], run_eager: Callable[[], object]) -> Culprit | None:
    """The first operator of the graph whose inputs are values of eager and whose result is not; None where there is
    no such operator. `run_eager` runs the model on the same inputs."""
    _, values = values_of(graph, inputs)
    with _EagerOperators() as eager:
        run_eager()
    computed = _Values(tensor for step in eager.steps for tensor in step.outputs)
    order = {node: position for position, node in enumerate(graph.graph.nodes)}

    def is_eagers(node: fx.Node) -> bool:
        if node.op != "call_function":  # an input or a weight
            return True
        if getattr(node.target, "is_view", False):
            return all(map(is_eagers, node.all_input_nodes))
        return all(map(computed.have, _tensors(values[node.name])))

    output = next(node for node in graph.graph.nodes if node.op == "output")
    waiting = [node for node in output.all_input_nodes if not is_eagers(node)]
    seen, found = set(waiting), []
    while waiting:
        node = waiting.pop()
        before = [each for each in node.all_input_nodes if not is_eagers(each)]
        if not before:
            found.append(node)
        waiting += [each for each in before if each not in seen]
        seen |= set(before)
    if not found:
        return None
    node = min(found, key=order.__getitem__)
    given = [value for each in node.all_input_nodes for value in _tensors(values[each.name])]
    beside = [each for user in node.users for each in user.all_input_nodes if each is not node and is_eagers(each)]
    known = given or [value for each in beside for value in _tensors(values[each.name])]
    instead = _instead(
        node,
        _tensors(values[node.name]),
        eager.steps,
        known,
        _Values(tensor for value in values.values() for tensor in _tensors(value)),
    )
    return Culprit(
        kind="operator",
        names=(operator_name(node),),
        line=line_of(node),
        module=module_of(node),
        inputs=tuple(map(shown_shape, given)),
        detail=_both(_tensors(values[node.name]), instead.outputs) if instead else "",
        note=f"eager computes {instead.name} there ({lines_shown(instead.stack)})" if instead else "",
    )


class _Step(NamedTuple):
    """An operator that eager runs."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    stack: traceback.StackSummary


class _EagerOperators(TorchDispatchMode):
    """Records every operator within, with its values as they are then: later operators may write to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [tensor.clone() for tensor in _tensors((args, kwargs))]
        result = func(*args, **(kwargs or {}))
        frames = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
        frames.reverse()
        self.steps.append(_Step(str(func), inputs, [tensor.clone() for tensor in _tensors(result)], frames))
        return result


class _Values:
    """Tensors, found by their values."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._by_form: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            self._by_form[tensor.shape, tensor.dtype].append(tensor)

    def have(self, tensor: Tensor) -> bool:
        return any(
            difference(each, tensor, REPEATED) <= 1 for each in self._by_form.get((tensor.shape, tensor.dtype), ())
        )


def _instead(
    node: fx.Node, results: Sequence[Tensor], steps: Sequence[_Step], given: Sequence[Tensor], of_graph: _Values
) -> _Step | None:
    """What eager computes of one of the `given` values: the node's operator with another result, else the first one
    whose result the graph has not."""
    values, own = _Values(given), _Values(results)
    following = [step for step in steps if step.outputs and any(map(values.have, step.inputs))]
    same = (step for step in following if step.name == str(node.target) and not any(map(own.have, step.outputs)))
    other = (step for step in following if not all(map(of_graph.have, step.outputs)))
    return next(same, None) or next(other, None)


def _both(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> str:
    """The two values of the element that differs most."""
    if not mine or not theirs or mine[0].shape != theirs[0].shape or not mine[0].numel() or mine[0].is_complex():
        return ""
    one, other = (each.detach().cpu().double() for each in (mine[0], theirs[0]))
    place = torch.unravel_index((one - other).abs().flatten().argmax(), one.shape) if one.dim() else ()
    index = tuple(map(int, place))
    at = f" at {list(index)}" if index else ""
    return f"exported {float(one[index]):.9g}, eager {float(other[index]):.9g}{at}"


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
