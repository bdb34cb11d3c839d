"""The second key of a unit: what code generation sees.

The first key has the model's sources, so any change of them captures the model anew. Most changes leave the graph as it
was: another name of a variable, a moved function, a class beside it. Code generation sees the graph alone, so a unit of
the store with the same graph, and with the same `aotc.compiler.planning.key.code_key`, has the same library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from aotc.compiler.capture.lifting.lift import Capture
from aotc.digest import sha256_json
from aotc.reads.tensors import dtype_name, tensor_digests

_WITH_CODE_ELSEWHERE = "triton_kernel_wrapper"
"""The operators of the model's own Triton kernels, of which a graph has only a number."""


def graph_key(code: str, captures: Sequence[Capture]) -> str:
    """The digest of these graphs and of `code`, all else that their library depends on; "" where the graphs do not say
    all that is computed."""
    described = [_described(capture) for capture in captures]
    return sha256_json([code, described]) if all(described) else ""


def _described(capture: Capture) -> dict[str, Any]:
    graphs, constants, operators = {}, {}, set()
    for path, part in capture.graph.named_modules():
        if not isinstance(part, fx.GraphModule):
            return {}
        for node in part.graph.nodes:
            if isinstance(node.target, HigherOrderOperator) and str(node.target).startswith(_WITH_CODE_ELSEWHERE):
                return {}
            if isinstance(node.target, OpOverload):  # an operator of the model's own may be declared otherwise
                operators.add(f"{node.target._schema} {sorted(map(str, node.target.tags))}")
            if node.op == "get_attr":
                held = _held(part, str(node.target))
                if isinstance(held, Tensor):
                    constants[f"{path}.{node.target}"] = held
                elif not isinstance(held, fx.GraphModule):
                    return {}
        graphs[path] = _text(part.graph)
    ranges = getattr(capture.program, "range_constraints", {})
    return {
        "graphs": graphs,
        "operators": sorted(operators),
        "constants": tensor_digests(constants),
        "examples": [_form(each) for each in capture.examples],
        "guards": sorted(capture.guards),
        "ranges": sorted(f"{symbol}: {values}" for symbol, values in ranges.items()),
    }


def _text(graph: fx.Graph) -> str:
    """The graph's operators with their arguments, and the dtype, shape, strides and device of each value, without the
    model's lines."""
    code = graph.python_code("self", verbose=True, include_stride=True, include_device=True).src
    return "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("#"))


def _form(example: Any) -> Any:
    if not isinstance(example, Tensor):  # a size, of a half of a training step
        return str(example)
    return [dtype_name(example.dtype), *(list(map(str, each)) for each in (example.shape, example.stride()))]


def _held(module: fx.GraphModule, path: str) -> Any:
    held: Any = module
    for name in path.split("."):
        held = getattr(held, name)
    return held
