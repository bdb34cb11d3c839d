"""Expressions over dims in prefix notation, which a program reads without a grammar: `* 2 @seq` for `2*seq`."""

from __future__ import annotations

import ast

from aotc.call_table.dispatch import is_name

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.USub: "neg",
    ast.Not: "not",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.And: "and",
    ast.Or: "or",
}


def in_prefix_notation(entry: int | str) -> str:
    """A size, a dim or an expression, in words with spaces between them. Dims begin with `@`; `and`, `or`, `min`, `max`
    and `chain` are followed by the number of their operands; a chain of comparisons by its first term, and by each
    comparison with its right side: `0 < seq <= 8` is `chain 3 0 < @seq <= 8`. Raises CorruptError.

    >>> in_prefix_notation("max(2*seq, 8) - 1")
    '- max 2 * 2 @seq 8 1'
    """
    if isinstance(entry, int) or is_name(entry):
        return str(entry) if isinstance(entry, int) else f"@{entry}"
    from aotc.expressions import parse

    return " ".join(_words(ast.parse(parse(entry).text, mode="eval").body))


def _words(node: ast.expr) -> list[str]:
    match node:
        case ast.Constant(value=value):
            return [str(value)]
        case ast.Name(id=name):
            return [f"@{name}"]
        case ast.UnaryOp(op=op, operand=operand):
            return [_OPERATORS[type(op)], *_words(operand)]
        case ast.BinOp(left=left, op=op, right=right):
            return [_OPERATORS[type(op)], *_words(left), *_words(right)]
        case ast.BoolOp(op=op, values=values):
            return [_OPERATORS[type(op)], *_all_of(values)]
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            further = [word for op, term in zip(ops, comparators, strict=True) for word in _compared(op, term)]
            return ["chain", str(1 + len(ops)), *_words(left), *further]
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return [name, *(_words(arguments[0]) if name == "abs" else _all_of(arguments))]
    raise AssertionError(f"`parse` has read {ast.dump(node)}")


def _all_of(nodes: list[ast.expr]) -> list[str]:
    return [str(len(nodes)), *(word for node in nodes for word in _words(node))]


def _compared(op: ast.cmpop, term: ast.expr) -> list[str]:
    return [_OPERATORS[type(op)], *_words(term)]
