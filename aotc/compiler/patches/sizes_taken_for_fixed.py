"""[AOTInductor] Code for a range of sizes holds for the size of autotuning only.

Some of Inductor's lowerings, such as that of gated linear units, specialise a size of a range to the size of
autotuning. `torch.compile` guards on such assumptions, and recompiles. AOTInductor drops the guards, and its code
returns results of the tuned size, or reads beyond the end of a smaller input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from aotc.compiler.capture.ranges.range_solver import answers_of
from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch
from aotc.errors import BuildError

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0033",
    only=("range",),
    upstream="pytorch#150364",
    of_graph=True,
    targets=(
        "torch._inductor.sizevars:SizeVarAllocator.evaluate_min(left, right)",
        "torch._inductor.sizevars:SizeVarAllocator.evaluate_max(left, right)",
    ),
)


@contextmanager
def apply(graph: fx.Graph) -> Iterator[None]:
    """While active, checks compiled code: raises BuildError unless it is valid for all sizes of the graph's ranges.

    The assumptions are equations, which are checked, and the order of two sizes, in diagonals and slices, which is left
    open. The other guards are for choices between two ways to compute the same, like one for small matrix products.
    """
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy.printers import PythonPrinter

    sizes, environment = _sizes(graph)
    if environment is None:
        yield
        return
    ranges, known = dict(environment.var_to_range), len(environment.guards)
    with _smaller_sizes_stay_open(ranges):
        yield
    for guard in environment.guards[known:]:
        if not isinstance(guard.expr, sympy.Eq) or not _are_bounded(guard.expr.free_symbols, ranges):
            continue
        if not _holds(guard.expr, ranges):
            needed = PythonPrinter().doprint(guard.expr.xreplace(sizes))
            raise BuildError(
                f"Inductor's code does not hold for all sizes of the range: it needs `{needed}`",
                hint="list fixed buckets instead of the range, or write the model with other operators",
                stage="compile",
            )


@contextmanager
def _smaller_sizes_stay_open(ranges: Mapping[Any, Any]) -> Iterator[None]:
    """While active, the minimum or maximum of two sizes of ranges is one of them only if this holds for all sizes."""
    import sympy
    from torch._inductor.sizevars import SizeVarAllocator
    from torch.utils._sympy.functions import Max, Min

    def among_ranges(evaluate: Any, of_both: Any, *, first_if_less: bool) -> Any:
        def evaluate_or_keep(self: Any, left: Any, right: Any) -> Any:
            sizes = [self.remove_precomputed_replacements(sympy.sympify(size)) for size in (left, right)]
            if not _are_bounded({symbol for size in sizes for symbol in size.free_symbols}, ranges):
                return evaluate(self, left, right)
            if _holds(sympy.Le(*sizes), ranges):
                return sizes[0 if first_if_less else 1]
            if _holds(sympy.Ge(*sizes), ranges):
                return sizes[1 if first_if_less else 0]
            return of_both(*sizes)

        return evaluate_or_keep

    smaller, larger = SizeVarAllocator.evaluate_min, SizeVarAllocator.evaluate_max
    with (
        replaced(SizeVarAllocator, "evaluate_min", among_ranges(smaller, Min, first_if_less=True)),
        replaced(SizeVarAllocator, "evaluate_max", among_ranges(larger, Max, first_if_less=False)),
    ):
        yield


def _sizes(graph: fx.Graph) -> tuple[dict[Any, Any], Any]:
    """The symbols of the inputs' sizes, with their texts for a message, and torch's ShapeEnv, None if all are fixed."""
    import sympy

    names: dict[Any, Any] = {}
    environment = None
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        shape: Any = value.shape if isinstance(value, Tensor) else ()
        for axis, size in enumerate(shape):
            if isinstance(size, torch.SymInt):
                environment = size.node.shape_env
                for symbol in size.node.expr.free_symbols:  # one symbol, in a linear expression, as in a manifest
                    offset, factor = size.node.expr.subs(symbol, 0), size.node.expr.coeff(symbol)
                    names.setdefault(symbol, (sympy.Symbol(f"{node.name}.shape[{axis}]") - offset) / factor)
    return names, environment


def _holds(relation: Any, ranges: Mapping[Any, Any]) -> bool:
    """Whether all sizes of the ranges satisfy an equation or inequality: each is tried, or, if there are too many, the
    bounds of the difference of both sides decide."""
    import sympy
    from torch.utils._sympy.value_ranges import bound_sympy

    if not isinstance(relation, sympy.core.relational.Relational):  # sympy has decided it
        return bool(relation)
    if (answers := answers_of(relation, ranges)) is not None:
        return False not in answers
    difference = bound_sympy(relation.lhs - relation.rhs, dict(ranges))
    return all(relation.func(end, 0) == sympy.true for end in (difference.lower, difference.upper))


def _are_bounded(symbols: Iterable[Any], ranges: Mapping[Any, Any]) -> bool:
    return all(symbol in ranges and ranges[symbol].upper.is_Integer for symbol in symbols)


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        return x.diagonal() * 2

    shapes = [{0: torch.export.Dim("rows", min=3, max=12)}]
    compiled = patches.library(function, torch.randn(4, 6), shapes=shapes)
    x = torch.randn(9, 6)
    torch.testing.assert_close(compiled(x)[0], function(x))
