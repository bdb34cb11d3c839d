"""Ranges of sizes that Inductor's code keeps, as the captured graph does.

Some of Inductor's lowerings are for one size, and take a size of a range for the one that it is tuned at: that of
gated linear units does. `torch.compile` guards on what is assumed so, and compiles again. AOTInductor drops it, and its
code returns results of the tuned size, or reads beyond the end of a smaller input. Such assumptions are equations. The
other guards are of decisions between two ways to compute the same, like one for small matrix products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from aotc.build.proofs import MOST_SIZES
from aotc.errors import BuildError


@contextmanager
def ranges_kept(graph: fx.Graph) -> Iterator[None]:
    """Raises BuildError where the code that is compiled within is not for all sizes of the graph's ranges."""
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy.printers import PythonPrinter

    sizes, environment = _sizes(graph)
    if environment is None:
        yield
        return
    ranges, known = dict(environment.var_to_range), len(environment.guards)
    yield
    for guard in environment.guards[known:]:
        if isinstance(guard.expr, sympy.Eq) and _fails(guard.expr, ranges):
            needed = PythonPrinter().doprint(guard.expr.xreplace(sizes))
            raise BuildError(
                f"Inductor's code is not for all sizes of the range: it needs `{needed}`",
                hint="list fixed buckets instead of the range, or write the model with other operators",
                stage="compile",
            )


def _sizes(graph: fx.Graph) -> tuple[dict[Any, Any], Any]:
    """What an input's free sizes are called in a message, and torch's environment of them, None where all are fixed."""
    import sympy

    names: dict[Any, Any] = {}
    environment = None
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        shape: Any = value.shape if isinstance(value, Tensor) else ()
        for axis, size in enumerate(shape):
            if isinstance(size, torch.SymInt):
                environment = size.node.shape_env
                factor, symbol = size.node.expr.as_coeff_Mul()
                names.setdefault(symbol, sympy.Symbol(f"{node.name}.shape[{axis}]") / factor)
    return names, environment


def _fails(condition: Any, ranges: Mapping[Any, Any]) -> bool:
    """Whether some sizes of the ranges do not meet a condition: each is tried, or where they are too many, the ends and
    what lies around powers of two."""
    import sympy

    symbols = sorted(condition.free_symbols, key=str)
    if any(symbol not in ranges or not ranges[symbol].upper.is_Integer for symbol in symbols):
        return False
    tried: list[Sequence[int]] = [range(int(ranges[symbol].lower), int(ranges[symbol].upper) + 1) for symbol in symbols]
    if math.prod(map(len, tried)) > MOST_SIZES:
        tried = [_telling(sizes) for sizes in tried]
    return any(
        condition.xreplace(dict(zip(symbols, map(sympy.Integer, values), strict=True))) == sympy.false
        for values in itertools.islice(itertools.product(*tried), MOST_SIZES)
    )


def _telling(sizes: Sequence[int]) -> list[int]:
    powers = (1 << bits for bits in range(sizes[-1].bit_length() + 1))
    near = {sizes[0], sizes[0] + 1, sizes[-1] - 1, sizes[-1], *(power + by for power in powers for by in (-1, 0, 1))}
    return sorted(size for size in near if size in sizes)
