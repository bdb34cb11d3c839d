"""What a call costs at some sizes. A cost must be positive, and must not fall when a dim grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import msgspec

from aotc.errors import TraceError
from aotc.expressions import Expression
from aotc.tools.advise.trace import LARGEST, DimSizes

Cost = Callable[[DimSizes], float]


def elements(shape: DimSizes) -> float:
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


class Term(NamedTuple):
    """`ms` milliseconds for each unit of `work`; `text` names the unit, "" for one call."""

    ms: float
    text: str
    work: Cost


class FittedLatency(NamedTuple):
    """A fitted latency: the sum of its terms. `error` is the mean relative error of the fit over its `points`.

    exact: there are as many terms as different amounts of work, so that any times would fit.
    """

    terms: tuple[Term, ...]
    error: float
    points: int
    exact: bool

    def milliseconds(self, shape: DimSizes) -> float:
        return math.fsum(term.ms * term.work(shape) for term in self.terms)

    def __str__(self) -> str:
        return " + ".join(f"{term.ms:.4g} ms" + (f" × {term.text}" if term.text else "") for term in self.terms)


Measurements = Sequence[tuple[DimSizes, float]]
"""Milliseconds of a call at some sizes."""


def fit_latency(
    measurements: Measurements, name: str, dims: Sequence[str], expression: str | None = None
) -> FittedLatency:
    """The least squares of relative errors: a short call counts as much as a long one.

    The terms are a constant, the product of the dims, and that product times each dim, as attention costs; or a
    constant and the expression. Coefficients are at least 0, so that the cost does not fall. More terms, and terms
    further back in that order, must halve the squares; there are fewer terms than different amounts of work, or two.

    Raises TraceError.
    """
    product = " × ".join(dims)
    candidates: list[tuple[str, Cost]] = [("", lambda shape: 1.0)]
    if expression:
        candidates.append((expression, expression_cost(expression, dims)))
    else:
        candidates.append((product, elements))
        candidates += [(f"{product} × {dim}", _times(axis)) for axis, dim in enumerate(dims)]
    columns = [[work(shape) for shape, _ in measurements] for _, work in candidates]
    distinct = len(set(zip(*columns[1:], strict=True)))
    if distinct < 2:
        raise TraceError(f"{name} has fewer than two different amounts of work", hint="measure two sizes or more")
    ms = [taken for _, taken in measurements]
    best: tuple[float, tuple[int, ...], list[float]] | None = None
    for count in range(1, max(2, min(len(candidates), distinct - 1)) + 1):
        for chosen in combinations(range(len(candidates)), count):
            weights = _least_squares([columns[n] for n in chosen], ms)
            if weights is None or min(weights) < 0:
                continue
            squares = math.fsum((fit - 1) ** 2 for fit in _relative([columns[n] for n in chosen], weights, ms))
            if best is None or squares < best[0] / 2 - 1e-18:
                best = squares, chosen, weights
    assert best is not None  # a constant fits anything
    _, chosen, weights = best
    terms = tuple(Term(ms, *candidates[n]) for n, ms in zip(chosen, weights, strict=True))
    errors = [abs(fit - 1) for fit in _relative([columns[n] for n in chosen], weights, ms)]
    return FittedLatency(terms, math.fsum(errors) / len(errors), len(measurements), exact=len(terms) >= distinct)


def _times(axis: int) -> Cost:
    return lambda shape: math.prod(shape) * shape[axis]


def _relative(columns: Sequence[Sequence[float]], weights: Sequence[float], ms: Sequence[float]) -> list[float]:
    """The fitted value of each measurement, divided by the measured one."""
    rows = zip(*columns, strict=True)
    return [math.fsum(map(float.__mul__, weights, map(float, row))) / own for row, own in zip(rows, ms, strict=True)]


def _least_squares(columns: Sequence[Sequence[float]], ms: Sequence[float]) -> list[float] | None:
    """The weights that make the columns' sum fit `ms` best, by relative error; None where they are not determined."""
    import numpy as np

    matrix = np.array(columns, np.float64).T / np.array(ms)[:, None]
    scale = np.abs(matrix).max(axis=0)
    found, _, rank, _ = np.linalg.lstsq(matrix / scale, np.ones(len(ms)), rcond=None)
    return [float(weight) for weight in found / scale] if rank == len(columns) else None


def read_latencies(lines: Iterable[bytes], name: str, dims: Sequence[str]) -> list[tuple[DimSizes, float]]:
    """Measured latencies, one a line: `{"batch": 4, "seq": 512, "ms": 3.1}`. Raises TraceError."""
    return [_point(text, f"{name}:{number}", dims) for number, text in enumerate(lines, 1) if text.strip()]


def _point(text: bytes, where: str, dims: Sequence[str]) -> tuple[DimSizes, float]:
    try:
        entry: Mapping[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        sizes, ms = [entry[dim] for dim in dims], entry["ms"]
    except (msgspec.DecodeError, RecursionError, KeyError):
        sizes, ms = [], None
    if not sizes or any(type(size) is not int or not 1 <= size <= LARGEST for size in sizes) or not _is_positive(ms):
        line = ", ".join(f'"{dim}": 1' for dim in dims)
        raise TraceError(f"{where} is not a measured latency", hint=f'a line is {{{line}, "ms": 3.1}}')
    return tuple(sizes), float(ms)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e300


def check_cost(cost: Cost, shapes: Iterable[DimSizes], dims: Sequence[str]) -> None:
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


def _named(shape: DimSizes, dims: Sequence[str]) -> str:
    return ", ".join(f"{dim}={size}" for dim, size in zip(dims, shape, strict=True))
