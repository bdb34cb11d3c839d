"""Prove conditions on sizes by evaluating them at all sizes of their ranges.

When the code of a model or an operator branches on a size, torch.export proves the answer from the range's ends, or
keeps the condition as a guard; it refuses a guard that it cannot solve, even if every size satisfies it. Attention on
GPUs pads its mask to a multiple of 8 and then checks `seq * (8 + seq - seq % 8) > 1`; the layers of an audio model
check remainders of `samples // 80 // 2`. Integer conditions are evaluated at many sizes at a time, as tensors.
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
"""torch.export's message about a condition that it can neither prove nor solve."""

MOST_SIZES = 1 << 26
"""The most combinations of sizes for a condition on integers: a few seconds for one condition."""

MOST_SUBSTITUTED = 1 << 14
"""The most combinations for a condition on other numbers (logarithms, quotients): three seconds."""

_AT_ONCE = 1 << 15
"""Sizes per tensor: few enough to stay in the CPU's cache, and for torch to use one thread."""


def settled(expression: Any, ranges: Any) -> Any:
    """`sympy.true` or `sympy.false` if the condition has this value at all sizes, otherwise None."""
    import sympy  # type: ignore[import-untyped]

    if not isinstance(expression, sympy.logic.boolalg.Boolean):
        return None
    answers = answers_of(expression, ranges)
    return sympy.sympify(answers.pop()) if answers is not None and len(answers) == 1 else None


def answers_of(condition: Any, ranges: Mapping[Any, Any]) -> set[bool] | None:
    """The values of a sympy condition over all combinations of sizes in its symbols' ranges.

    None if a range is unbounded, if there are too many combinations, or if the condition is undefined at one of them.
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
            with ThreadPoolExecutor(1) as plain:  # a thread in which torch.export does not trace tensors
                return plain.submit(_answers, condition, symbols, sizes).result()
    except _NotWhole:
        return _substituted(condition, symbols, sizes) if count <= MOST_SUBSTITUTED else None
    except RuntimeError:  # a remainder of zero
        pass
    return None


def _answers(condition: Any, symbols: Sequence[Any], sizes: Sequence[range]) -> set[bool]:
    """The values over all combinations, smallest sizes first; stops when both values were found."""
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
        except (ArithmeticError, ValueError):  # the condition is undefined at this size
            return None
        if answer not in (sympy.true, sympy.false):
            return None
        answers.add(bool(answer))
        if len(answers) > 1:
            break
    return answers


class _NotWhole(Exception):
    """An expression needs numbers other than 63-bit integers."""


def _evaluate(expression: Any, values: dict[Any, Tensor]) -> Tensor:
    """The value of an expression for each combination of sizes; values of its parts are added to `values`.

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
"""Functions of torch and sympy on integers, by the names of their classes."""
