"""The digest of Python code, which comments, layout and docstrings do not change."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from aotc.digest import sha256_bytes

_NOT_MEANT = ("ctx", "kind", "type_comment")
"""Fields of nodes that follow from the node's place, or say how a text was written."""


def syntax_digest(source: bytes) -> str:
    """The digest of the syntax tree of Python code; of the bytes themselves, where they are not Python.

    `ast.dump` writes a tree in another way in each version of Python. Here an empty field counts as absent, so a field
    that a later version adds (`type_params`) changes nothing for code that does not use it.
    """
    parts: list[str] = []
    try:
        _write(ast.parse(source), parts.append)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return sha256_bytes(source)
    return sha256_bytes("".join(parts).encode("utf-8", "surrogatepass"))


def _write(value: Any, write: Callable[[str], object]) -> None:
    if isinstance(value, ast.AST):
        write(f"{type(value).__name__}(")
        for name in value._fields:
            member = getattr(value, name, None)
            if name in _NOT_MEANT or member == [] or (member is None and not isinstance(value, ast.Constant)):
                continue
            write(f"{name}=")
            _write(member, write)
        write(")")
    elif isinstance(value, list):
        write("[")
        for item in value:
            if not _is_docstring(item):
                _write(item, write)
                write(",")
        write("]")
    else:
        write(f"{type(value).__name__} {value!r};")


def _is_docstring(statement: Any) -> bool:
    """Whether it is a string alone, which does nothing, wherever it stands."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False
