"""Symbolic sizes of a backward graph: a library takes tensors only, so they are read from the tensors' axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import py_sym_types

from aotc.errors import BuildError


def read_from_tensors(graph: fx.Graph, numbers: Sequence[fx.Node]) -> None:
    """Replace the placeholders `numbers`, whose values are symbolic numbers, by expressions of the sizes of the other
    placeholders. Raises BuildError for a number that these do not tell."""
    tensors = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), Tensor)]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        axes = _axes(graph, tensors, numbers)
        for node in numbers:
            node.replace_all_uses_with(_expressed(node, axes))
            graph.erase_node(node)


def symbols_of(nodes: Sequence[fx.Node]) -> set[Any]:
    """The symbols in the sizes of these placeholders, and in those that are numbers."""
    found: set[Any] = set()
    for node in nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else [value]
        for size in sizes:
            if isinstance(size, py_sym_types):
                found |= size.node.expr.free_symbols
    return found


def _axes(graph: fx.Graph, tensors: Sequence[fx.Node], numbers: Sequence[fx.Node]) -> dict[Any, fx.Node]:
    """The sizes that are needed, by their expression: those of an axis."""
    needed = {node.meta["val"].node.expr for node in numbers}
    needed |= {symbol for expression in needed for symbol in expression.free_symbols}
    found: dict[Any, fx.Node] = {}
    for tensor in tensors:
        for axis, size in enumerate(tensor.meta["val"].shape):
            expression = size.node.expr if isinstance(size, torch.SymInt) else None
            if expression in needed and expression not in found:
                found[expression] = graph.call_function(torch.ops.aten.sym_size.int, (tensor, axis))
                found[expression].meta["val"] = size
    return found


def _expressed(node: fx.Node, axes: dict[Any, fx.Node]) -> fx.Node:
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    expression = node.meta["val"].node.expr
    if expression in axes:
        return axes[expression]
    if missing := expression.free_symbols - axes.keys():
        raise BuildError(
            f"the backward needs the size {sorted(map(str, missing))[0]}, which no axis of its tensors has",
            hint="give the dim a fixed size in each bucket, or an input an axis of that size alone",
            stage="export",
        )
    tracer = fx.proxy.GraphAppendingTracer(node.graph)
    proxies = {symbol: fx.Proxy(axis, tracer) for symbol, axis in axes.items()}
    made = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    made.node.meta["val"] = node.meta["val"]
    result: fx.Node = made.node
    return result
