"""What forward reads outside of its module and its arguments, and is compiled in: clocks, and global variables that
other code may change.

Both are found while the model runs in eager: a profile function sees every call. Global variables are those that the
model's own functions name. Of these a constant is compared with its source at load, as all code is; here are those of
which the source shows a change within a function, or whose value is no longer the literal in the source.
"""

from __future__ import annotations

import ast
import datetime
import dis
import functools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from aotc.compiler.explain_failure import is_installed, is_model_code

_CLOCKS = {
    getattr(time, name): f"time.{name}"
    for name in (*("time", "monotonic", "perf_counter", "process_time", "thread_time"), "time_ns", "monotonic_ns")
}
_OF_DATES = (datetime.datetime, datetime.date)
_CONTAINERS = (list, dict, set)
_PLAIN = (bool, int, float, str, *_CONTAINERS)
_CHANGING = frozenset(
    {*("append", "extend", "insert", "pop", "remove", "clear", "update", "add", "setdefault", "discard", "popitem")}
)


@contextmanager
def outside_reads() -> Iterator[list[str]]:
    """While active, note what calls of the model read. The yielded list has a sentence for each, at the end."""
    notes: list[str] = []
    codes: dict[int, tuple[CodeType, dict[str, Any]]] = {}
    clocks: dict[str, None] = {}

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            codes.setdefault(id(frame.f_code), (frame.f_code, frame.f_globals))
        elif event == "c_call" and (name := _clock(argument)) and is_model_code(frame.f_code.co_filename):
            clocks[f"`{name}` at {_place(frame.f_code.co_filename, frame.f_lineno)}"] = None

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield notes
    finally:
        sys.setprofile(before)
    notes += [f"the model reads {clock}: the time of the build is compiled in; pass it as an input" for clock in clocks]
    own = [one for one in codes.values() if is_model_code(one[0].co_filename) and not is_installed(one[0].co_filename)]
    notes += dict.fromkeys(
        f"the model reads the global variable {read} at {read.place}, which other code may change: its value at the "
        "build is compiled in, and a change is not noticed; keep it in an attribute of the module, which is compared"
        for code, variables in own
        for read in _globals_read(code, variables)
        if _may_change(read)
    )


def _clock(function: Any) -> str:
    try:
        if (name := _CLOCKS.get(function)) is not None:
            return name
    except TypeError:  # bound to an object that has no hash
        return ""
    owner = getattr(function, "__self__", None)
    if owner in _OF_DATES and function.__name__ in ("now", "utcnow", "today"):
        return f"{owner.__name__}.{function.__name__}"
    return ""


class _Read(NamedTuple):
    """A global variable with a plain value: of the module in `file`, read at `place`."""

    name: str
    file: str
    value: Any
    place: str

    def __str__(self) -> str:
        return f"`{self.name}` of {Path(self.file).name}"


def _globals_read(code: CodeType, variables: dict[str, Any]) -> Iterator[_Read]:
    """The global variables that a function names, and those of modules, as in `settings.LAYERS`."""
    module: ModuleType | None = None
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = (step.positions and step.positions.lineno) or line
        value: Any = None
        file = code.co_filename
        if step.opname == "LOAD_GLOBAL":
            value = variables.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and module is not None:
            value, file = vars(module).get(step.argval), str(getattr(module, "__file__", None))
        module = value if isinstance(value, ModuleType) else None
        if type(value) in _PLAIN:
            yield _Read(step.argval, file, value, _place(code.co_filename, line))


def _may_change(read: _Read) -> bool:
    file, name = read.file, read.name
    for _ in range(3):  # `from settings import LAYERS`
        tree = _tree(file)
        origin = tree and _imported_from(tree, name)
        if not origin:
            break
        module = sys.modules.get(origin[0])
        file, name = str(getattr(module, "__file__", None)), origin[1]
    if tree is None or not is_model_code(file) or is_installed(file):
        return False
    return _changed_in_functions(tree, name) or _is_no_longer_its_literal(tree, name, read.value)


@functools.cache
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _imported_from(tree: ast.Module, name: str) -> tuple[str, str] | None:
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return statement.module, alias.name
    return None


def _changed_in_functions(tree: ast.Module, name: str) -> bool:
    """Whether a function of the module sets the global variable, or changes what it holds."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        nodes = list(ast.walk(function))
        if any(isinstance(node, ast.Global) and name in node.names for node in nodes):
            return True
        own = {node.arg for node in nodes if isinstance(node, ast.arg)}
        own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        if name not in own and any(_changes(node, name) for node in nodes):
            return True
    return False


def _changes(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Subscript(value=ast.Name(id=found), ctx=ast.Store() | ast.Del()):
            return found == name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=found), attr=method)):
            return found == name and method in _CHANGING
    return False


def _is_no_longer_its_literal(tree: ast.Module, name: str, value: Any) -> bool:
    assigned = []
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=found)], value=expression) if found == name:
                assigned.append(expression)
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as expression) if found == name:
                assigned.append(expression)
            case ast.Assign() | ast.AnnAssign() | ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.ClassDef():
                pass
            case _ if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement)):
                return False  # it is made up by several statements of the module
    try:
        return len(assigned) == 1 and bool(ast.literal_eval(assigned[0]) != value)
    except (ValueError, TypeError):
        return False


def _place(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"
