"""Call the captured graph as the model is called, to compare both before the graph is compiled."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.explain_failure import line_named
from aotc.models.calls import state_put_back
from aotc.reads.tensors import plain_state
from aotc.records import Dims, Output, StridedView
from aotc.tensors.rounding import Result
from aotc.tensors.strided_views import make_view


def call_captured(
    module: nn.Module, captured: Capture, leaves: Sequence[Any], written: Collection[str], sizes: Dims
) -> tuple[Result, str]:
    """The graph's outputs, its inputs after the call (which it may write to) and the state `written`, in the order of
    `call_model`; and the first tensor whose size differs from the exported one, as text, "" if none does.

    The state is restored afterwards. `sizes` are those of the leaves. Exceptions of operators pass through.
    """
    state = plain_state(module)
    with state_put_back(module, written):
        computed, other_size = run_graph(captured, leaves, state)
        outputs = (_output(output, computed, leaves, state, sizes) for output in captured.outputs)
        found = (*outputs, *leaves, *(state[name] for name in written))
        return [item.detach().clone() if isinstance(item, Tensor) else item for item in found], other_size


def _output(
    output: Output, computed: Sequence[Any], values: Sequence[Any], state: Mapping[str, Tensor], sizes: Dims
) -> Any:
    if output.index is not None:
        return computed[output.index]
    if output.leaf is not None and output.axis is not None:
        return values[output.leaf].shape[output.axis]
    if output.leaf is None and output.state is None:
        return output.constant
    given = values[output.leaf] if output.leaf is not None else state[str(output.state)]
    if isinstance(output.view, StridedView):
        return make_view(output, output.view, lambda _: sizes)(given, given, values, values)
    return given


def run_graph(captured: Capture, leaves: Sequence[Any], state: Mapping[str, Tensor]) -> tuple[Sequence[Any], str]:
    """The graph's result, and the first tensor whose size differs from the exported one, as text, "" if none does. The
    graph writes to the leaves and the state, as the model does."""
    values = [
        state[argument.state].detach() if argument.state is not None else leaves[argument.leaf or 0]
        for argument in captured.arguments
    ]
    torch.manual_seed(0)
    run = _ComparingSizes(captured.graph)
    result: Sequence[Any] = run.run(*values)
    return result, run.found


class _ComparingSizes(fx.Interpreter):
    """Compares the shape of each tensor with the exported one; `found` describes the first difference.

    The symbols in the exported sizes get their values from the placeholders, which come first.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._symbols: dict[Any, Any] = {}
        self.found = ""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        noted = n.meta.get("val")
        if isinstance(value, Tensor) and isinstance(noted, Tensor):
            if n.op == "placeholder":
                self._bind(noted.shape, value.shape)
            sizes = [self._evaluate(size) for size in noted.shape]
            alike = [size in (None, actual) for size, actual in zip(sizes, value.shape, strict=False)]
            if not self.found and (len(sizes) != value.ndim or not all(alike)):
                line = line_named(n.meta.get("stack_trace") or "")
                where = f" of {line}" if line else ""
                self.found = f"{n.name}{where} is {list(value.shape)} there, the code would be for {sizes}"
        return value

    def _bind(self, noted: Sequence[Any], actual: Sequence[int]) -> None:
        for size, value in zip(noted, actual, strict=True):
            if isinstance(size, torch.SymInt):
                expression = size.node.expr
                for symbol in expression.free_symbols:  # one symbol, in a linear expression, as in a manifest
                    self._symbols[symbol] = (value - expression.subs(symbol, 0)) / expression.coeff(symbol)

    def _evaluate(self, size: Any) -> int | None:
        """A size as a number; None for one that depends on the inputs' values.

        torch's compiler replaces a size that is constant for all sizes from 2 on, such as min(1, n - 1), by its value.
        """
        if isinstance(size, int):
            return size
        bounds = size.node.shape_env.bound_sympy(size.node.expr)
        value = bounds.lower if bounds.is_singleton() else size.node.expr.xreplace(self._symbols)
        return int(value) if value.is_Integer else None
