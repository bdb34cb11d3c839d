"""Rules of form for all of aotc: how functions are called, how many parameters they have, and who imports whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT

PACKAGE = ROOT / "aotc"
FILES = sorted(PACKAGE.rglob("*.py"))

MOST_PARAMETERS = 8
MAY_HAVE_MORE = {
    "runtime/load.py load": "public: its options are documented one by one",
    "runtime/prepare.py prepare": "public",
    "tools/remembering/compile.py compile": "public",
    "tools/advise/advice.py advise": "public",
    "compiler/capture/replaced_functions.py _inverse_of_a_range": "it has the parameters of torch.istft",
}
"""Functions beside commands of click, whose parameters are the options of a command line."""


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def unpacked(node: ast.AST) -> bool:
    """Whether it is a call in which a tuple or a list is written out only to be unpacked: `f(*(a, b), *(c, d))`."""
    return isinstance(node, ast.Call) and any(
        isinstance(each, ast.Starred) and isinstance(each.value, ast.Tuple | ast.List) for each in node.args
    )


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return len([each for each in named if each is not None and each.arg not in ("self", "cls")])


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("command(" in ast.unparse(each) for each in node.decorator_list)


@pytest.mark.parametrize(("call", "is_wrong"), [("f(*(a, b), c)", True), ("f(*[a])", True), ("f(*a, b)", False)])
def test_a_call_of_unpacked_literals_is_seen(call: str, is_wrong: bool) -> None:
    assert any(map(unpacked, ast.walk(ast.parse(call)))) == is_wrong


def test_no_call_unpacks_a_tuple_that_it_writes_out() -> None:
    """Arguments so written are neither named nor one on a line."""
    found = [f"{path.relative_to(PACKAGE)}" for path in FILES for node in nodes(path) if unpacked(node)]
    assert {*found} == {"tools/remembering/builds.py", "tools/remembering/compile.py"}  # which are being rewritten


def test_no_function_has_more_than_eight_parameters() -> None:
    many = {
        f"{path.relative_to(PACKAGE)} {node.name}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and parameters(node) > MOST_PARAMETERS
        and not is_command(node)
    }
    assert many == MAY_HAVE_MORE.keys()
