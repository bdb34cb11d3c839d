"""What a call costs at some sizes. A cost must be positive, and must not fall when a dim grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from aotc.advise.trace import Shape
from aotc.errors import TraceError
from aotc.expressions import Expression

Cost = Callable[[Shape], float]


def elements(shape: Shape) -> float:
    """The product of the dims: tokens, for batch and length."""
    return math.prod(shape)


def expression_cost(text: str, dims: Sequence[str]) -> Cost:
    """The cost that an expression over dims gives, like `batch * seq * (512 + seq)`. Raises TraceError."""
    try:
        expression = Expression(text)
    except ValueError as error:
        raise TraceError(f"--cost: {error}", hint="write an expression over dims, like `batch * seq`") from None
    if unknown := sorted(expression.names - {*dims}):
        raise TraceError(f"--cost: the trace has no dim `{unknown[0]}`", hint=f"its dims are {', '.join(dims)}")
    return lambda shape: expression.evaluate(dict(zip(dims, shape, strict=True)))


class Latency(NamedTuple):
    """A fitted latency: `fixed` milliseconds per call, and `each` per unit of `work`. `error` is the mean relative
    error of the fit over its `points`."""

    fixed: float
    each: float
    work: Cost
    error: float
    points: int

    def milliseconds(self, shape: Shape) -> float:
        return self.fixed + self.each * self.work(shape)


def fit_latency(lines: Iterable[bytes], name: str, dims: Sequence[str], work: Cost) -> Latency:
    """The least squares of relative errors through latencies, one a line: `{"batch": 4, "seq": 512, "ms": 3.1}`.

    Both coefficients are at least 0, so that the cost does not fall. Raises TraceError.
    """
    points = [_point(text, f"{name}:{number}", dims, work) for number, text in enumerate(lines, 1) if text.strip()]
    if len({x for x, _ in points}) < 2:
        raise TraceError(f"{name} holds fewer than two different amounts of work", hint="measure two sizes or more")
    # ms ≈ fixed + each · x, each point weighted by 1/ms²: a short call counts as much as a long one
    s0, s1, s2 = (math.fsum((x**power) / y**2 for x, y in points) for power in (0, 1, 2))
    t0, t1 = (math.fsum((x**power) / y for x, y in points) for power in (0, 1))
    det = s0 * s2 - s1 * s1
    fixed, each = (t0 * s2 - t1 * s1) / det, (s0 * t1 - s1 * t0) / det
    if fixed < 0:
        fixed, each = 0.0, t1 / s2
    elif each < 0:
        fixed, each = t0 / s0, 0.0
    error = math.fsum(abs(fixed + each * x - y) / y for x, y in points) / len(points)
    return Latency(fixed, each, work, error, len(points))


def _point(text: bytes, where: str, dims: Sequence[str], work: Cost) -> tuple[float, float]:
    try:
        entry: Mapping[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        sizes, ms = [entry[dim] for dim in dims], entry["ms"]
    except (msgspec.DecodeError, KeyError):
        sizes, ms = [], None
    if not sizes or any(type(size) is not int or size < 1 for size in sizes) or not _is_positive(ms):
        line = ", ".join(f'"{dim}": 1' for dim in dims)
        raise TraceError(f"{where} is not a measured latency", hint=f'a line is {{{line}, "ms": 3.1}}')
    return float(work(tuple(sizes))), float(ms)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def check_cost(cost: Cost, shapes: Iterable[Shape], dims: Sequence[str]) -> None:
    """Raises TraceError where the cost is not positive, or falls from one size of a dim to the next one seen."""
    shapes = list(shapes)
    levels = [sorted({shape[axis] for shape in shapes}) for axis in range(len(dims))]
    following = [dict(pairwise(row)) for row in levels]
    for shape in shapes:
        try:
            here = cost(shape)
            larger = [
                (axis, cost((*shape[:axis], more, *shape[axis + 1 :])))
                for axis in range(len(dims))
                if (more := following[axis].get(shape[axis])) is not None
            ]
        except ArithmeticError:
            raise TraceError(f"the cost cannot be computed at {_named(shape, dims)}") from None
        if here <= 0:
            raise TraceError(f"the cost is {here} at {_named(shape, dims)}", hint="a cost is positive")
        falls = next((axis for axis, there in larger if there < here), None)
        if falls is not None:
            raise TraceError(
                f"the cost falls when `{dims[falls]}` grows beyond {_named(shape, dims)}",
                hint="padding would be free; write a cost that does not fall",
            )


def _named(shape: Shape, dims: Sequence[str]) -> str:
    return ", ".join(f"{dim}={size}" for dim, size in zip(dims, shape, strict=True))
