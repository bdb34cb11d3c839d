"""Arithmetic and conditions over dims, like `2*seq` or `seq % 8 == 0`: parsed once, evaluated without a compiler.

The text is Python's expression grammar cut down to integers, names, `+ - * // %`, comparisons, `and or not`, and the
functions `min`, `max` and `abs`. Nothing is passed to `eval` or `exec`: a record from a store cannot run code here.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping

from aotc.errors import CorruptError
from aotc.records import Signature, Size, SizeRange, TensorLeaf

MAX_LENGTH = 1000
MAX_DEPTH = 40

Evaluate = Callable[[Mapping[str, int]], int]

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {"min": min, "max": max, "abs": abs}


class Expression:
    """A parsed expression: `text`, the `names` it needs, and `evaluate(sizes) -> int` (conditions give 0 or 1).

    `evaluate` raises KeyError for a missing name and ZeroDivisionError for a division by zero.
    """

    __slots__ = ("evaluate", "names", "text")

    def __init__(self, text: str) -> None:
        """Raises ValueError where the text is not in the grammar."""
        if len(text) > MAX_LENGTH:
            raise ValueError(f"an expression of {len(text)} characters; at most {MAX_LENGTH} are allowed")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"`{text}` is not an expression over dims") from error
        self.text = text.strip()
        self.names = frozenset(
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in _FUNCTIONS
        )
        self.evaluate: Evaluate = _compile(tree, text, MAX_DEPTH)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


def parse(text: str) -> Expression:
    """An expression of a record. Raises CorruptError where it is not one."""
    try:
        return Expression(text)
    except ValueError as error:
        raise CorruptError(f"the record holds an expression that cannot be read: {error}") from error


def _compile(node: ast.expr, text: str, depth: int) -> Evaluate:
    if depth == 0:
        raise ValueError(f"`{text}` is nested too deeply")
    match node:
        case ast.Constant(value=int(value)) if type(value) is int:
            return lambda sizes: value
        case ast.Name(id=name) if name not in _FUNCTIONS:
            return lambda sizes: sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _compile(operand, text, depth - 1)
            return lambda sizes: -inner(sizes)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _compile(operand, text, depth - 1)
            return lambda sizes: int(not inner(sizes))
        case ast.BinOp(left=left_node, op=op, right=right_node) if type(op) in _BINARY:
            binary = _BINARY[type(op)]
            left, right = _compile(left_node, text, depth - 1), _compile(right_node, text, depth - 1)
            return lambda sizes: binary(left(sizes), right(sizes))
        case ast.BoolOp(op=op, values=values):
            parts = [_compile(value, text, depth - 1) for value in values]
            combine = all if isinstance(op, ast.And) else any
            return lambda sizes: int(combine(part(sizes) for part in parts))
        case ast.Compare(left=left_node, ops=ops, comparators=comparators) if all(type(op) in _COMPARE for op in ops):
            first, *others = (_compile(term, text, depth - 1) for term in [left_node, *comparators])
            chain = [(_COMPARE[type(op)], term) for op, term in zip(ops, others, strict=True)]
            return lambda sizes: _holds(first(sizes), chain, sizes)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS and (
            len(arguments) == 1 if name == "abs" else len(arguments) > 1
        ):
            function = _FUNCTIONS[name]
            values_of = [_compile(argument, text, depth - 1) for argument in arguments]
            return lambda sizes: function(*(value(sizes) for value in values_of))
    raise ValueError(
        f"`{text}` is not an expression over dims: only integers, dims, + - * // %, comparisons, and, or, not, "
        "min, max and abs are allowed"
    )


def _holds(left: int, chain: Iterable[tuple[Callable[[int, int], bool], Evaluate]], sizes: Mapping[str, int]) -> int:
    """Each term is evaluated once at most, as Python does: chains within chains would take twice as long for each."""
    for compare, term in chain:
        right = term(sizes)
        if not compare(left, right):
            return 0
        left = right
    return 1


_SAMPLES = (0, 1, 2, 7, 1_000_003, 2_147_483_647)
"""Sizes at which an expression is compared with a line: large ones too, for `min(seq, 512)` and `seq % 64`."""


def linear_form(expression: Expression) -> tuple[str, int, int] | None:
    """(name, scale, offset) of an expression `scale*name + offset` over one dim, or None."""
    if len(expression.names) != 1:
        return None
    name = next(iter(expression.names))
    try:
        values = [expression.evaluate({name: size}) for size in _SAMPLES]
    except (ArithmeticError, KeyError):
        return None
    scale, offset = values[1] - values[0], values[0]
    if scale <= 0 or values != [size * scale + offset for size in _SAMPLES]:
        return None
    return name, scale, offset


def paddable_dims(signature: Signature) -> frozenset[str]:
    """The dims that every input that uses them says how to pad.

    Raises ValueError for a shape that holds no expression.
    """
    leaves = [leaf for leaf in signature.leaves if isinstance(leaf, TensorLeaf)]
    return padded_by_all(
        (Expression(entry).names, leaf.pad) for leaf in leaves for entry in leaf.shape if isinstance(entry, str)
    )


def padded_by_all(axes: Iterable[tuple[Iterable[str], Container[str]]]) -> frozenset[str]:
    """Of the dims that each axis of the inputs names, those that all its inputs pad."""
    uses: dict[str, bool] = {}
    for names, pad in axes:
        for name in names:
            uses[name] = uses.get(name, True) and name in pad
    return frozenset(name for name, padded in uses.items() if padded)


def tightness(bucket: Iterable[Size], sizes: Iterable[int]) -> tuple[int, int]:
    """What decides between buckets with ranges that hold a request, the least first: how many sizes they hold, and how
    near above the request they are tuned; below it they are far."""
    ranges = [(size, entry) for entry, size in zip(bucket, sizes, strict=True) if isinstance(entry, SizeRange)]
    width = math.prod((entry.max - entry.min) // entry.multiple_of + 1 for _, entry in ranges)
    return width, sum(r.tune_at - size if r.tune_at >= size else 2**40 + size - r.tune_at for size, r in ranges)
