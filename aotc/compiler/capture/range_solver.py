"""Conditions on sizes that hold for all sizes of their ranges, found by trying each.

Where the model's code, or an operator's, asks something of a size, torch.export proves the answer from the range's ends
or keeps it as a guard; a guard that it cannot take apart it refuses, whether or not some size violates it. Attention on
GPUs pads its mask to a multiple of 8 and then asks whether `seq * (8 + seq - seq % 8) > 1`; the layers of an audio
model ask for remainders of `samples // 80 // 2`. Whole numbers are tried many at a time, as tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

NOT_PROVED = "satisfy the generated guard"
"""What torch.export says of a condition that it can neither prove nor take apart."""

MOST_SIZES = 1 << 26
"""In the ranges of a condition on whole numbers, all combinations: a few seconds' work for one condition at most."""

MOST_SUBSTITUTED = 1 << 14
"""Where it is of other numbers (logarithms, quotients): three seconds' work."""

_AT_ONCE = 1 << 15
"""Few enough to stay in a cache, and for torch to take one thread."""


def settled(expression: Any, ranges: Any) -> Any:
    """`sympy.true` or `sympy.false` where all sizes give it, otherwise None."""
    import sympy  # type: ignore[import-untyped]

    if not isinstance(expression, sympy.logic.boolalg.Boolean):
        return None
    answers = answers_of(expression, ranges)
    return sympy.sympify(answers.pop()) if answers is not None and len(answers) == 1 else None


def answers_of(condition: Any, ranges: Mapping[Any, Any]) -> set[bool] | None:
    """What a sympy condition gives for the sizes of its symbols' ranges, all combinations.

    None where a range has no end, they are too many, or where it says nothing of a size.
    """
    symbols = sorted(condition.free_symbols, key=str)
    if not symbols or not all(symbol in ranges for symbol in symbols):
        return None
    ends = [(ranges[symbol].lower, ranges[symbol].upper) for symbol in symbols]
    if not all(end.is_Integer for pair in ends for end in pair):
        return None
    sizes = [range(int(lower), int(upper) + 1) for lower, upper in ends]
    count = math.prod(map(len, sizes))
    try:
        if count <= MOST_SIZES:
            with ThreadPoolExecutor(1) as plain:  # a thread in which torch.export does not watch tensors
                return plain.submit(_answers, condition, symbols, sizes).result()
    except _NotWhole:
        return _substituted(condition, symbols, sizes) if count <= MOST_SUBSTITUTED else None
    except RuntimeError:  # a remainder of zero
        pass
    return None


def _answers(condition: Any, symbols: Sequence[Any], sizes: Sequence[range]) -> set[bool]:
    """Until there are two: the smallest sizes first."""
    count, answers = math.prod(map(len, sizes)), set[bool]()
    for begin in range(0, count, _AT_ONCE):
        number = torch.arange(begin, min(begin + _AT_ONCE, count))
        values: dict[Any, Tensor] = {}
        for symbol, every in zip(symbols, sizes, strict=True):
            values[symbol] = number % len(every) + every.start
            number = number // len(every)
        answers.update(torch.unique(_evaluate(condition, values)).tolist())
        if len(answers) > 1:
            break
    return answers


def _substituted(condition: Any, symbols: Sequence[Any], sizes: Sequence[range]) -> set[bool] | None:
    import itertools

    import sympy

    answers: set[bool] = set()
    for values in itertools.product(*sizes):
        try:
            answer = condition.xreplace(dict(zip(symbols, map(sympy.Integer, values), strict=True)))
        except (ArithmeticError, ValueError):  # the condition says nothing of this size
            return None
        if answer not in (sympy.true, sympy.false):
            return None
        answers.add(bool(answer))
        if len(answers) > 1:
            break
    return answers


class _NotWhole(Exception):
    """An expression is not of whole numbers of 63 bits."""


def _evaluate(expression: Any, values: dict[Any, Tensor]) -> Tensor:
    """The value of an expression for each combination of sizes; what is found is added to `values`.

    Raises _NotWhole, or RuntimeError for a division by zero.
    """
    if expression not in values:
        if expression.is_Integer or (expression.is_Boolean and not expression.args):
            found = torch.tensor(bool(expression) if expression.is_Boolean else _bounded(int(expression)))
        else:
            function = _FUNCTIONS.get(type(expression).__name__)
            if function is None or not expression.args:
                raise _NotWhole
            found = function(*(_evaluate(part, values) for part in expression.args))
        values[expression] = found
    return values[expression]


def _bounded(number: int) -> int:
    if abs(number) >= 1 << 62:
        raise _NotWhole
    return number


def _largest(tensor: Tensor) -> int:
    return max(abs(int(end)) for end in tensor.aminmax())


def _sum(*parts: Tensor) -> Tensor:
    _bounded(sum(map(_largest, parts)))
    return functools.reduce(torch.add, parts)


def _product(*parts: Tensor) -> Tensor:
    _bounded(math.prod(map(_largest, parts)))
    return functools.reduce(torch.mul, parts)


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    if exponent.ndim or not 0 <= int(exponent) < 63:
        raise _NotWhole
    _bounded(_largest(base) ** int(exponent))
    return base ** int(exponent)


def _quotient(one: Tensor, other: Tensor) -> Tensor:
    return torch.div(one, other, rounding_mode="floor")


def _of_pairs(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda *parts: functools.reduce(function, parts)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "Add": _sum,
    "Mul": _product,
    "Pow": _power,
    "PowByNatural": _power,
    "FloorDiv": _quotient,
    "CleanDiv": _quotient,
    "Mod": torch.remainder,
    "PythonMod": torch.remainder,
    "ModularIndexing": lambda base, divisor, modulus: torch.remainder(_quotient(base, divisor), modulus),
    "Max": _of_pairs(torch.maximum),
    "Min": _of_pairs(torch.minimum),
    "Identity": lambda value: value,
    "Equality": torch.eq,
    "Unequality": torch.ne,
    "LessThan": torch.le,
    "StrictLessThan": torch.lt,
    "GreaterThan": torch.ge,
    "StrictGreaterThan": torch.gt,
    "And": _of_pairs(torch.logical_and),
    "Or": _of_pairs(torch.logical_or),
    "Not": torch.logical_not,
}
"""torch's and sympy's own functions of whole numbers, by the names of their classes."""
