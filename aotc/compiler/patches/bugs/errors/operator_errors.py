"""What an operator of torch's or of the user's own raises is what the library raises, as in eager.

A library calls operators through torch's C functions, which catch what the operator raises and return an error code.
Inductor writes some of these calls (`scatter_add`, `index_put`, the copy of a constant that is returned; with torch
2.11 and 2.12 the user's own operators, too) as statements that drop the code: the library would go on with half a
result. So the final source is read once, and every such statement gets the check, whichever part of Inductor wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_LINALG_CHECK = "aten::_linalg_check_errors"
"""The operator that raises for a matrix that cannot be factored, and gives nothing that others could use."""

_STATEMENT = re.compile(
    r"(?:[;{})]|\belse\b|^\s*#[^\n]*\n|\A)(?:\s|//[^\n]*\n)*(?P<call>\baoti_torch_(?P<name>\w+)\s*\()", re.MULTILINE
)
"""The beginning of a statement that is a call of one of torch's C functions."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|[()]')

_NO_ERROR_CODE = ("print_tensor_handle", "save_tensor_handle", "check", "warn", "grad_mode_set_enabled")
"""Those of torch's C functions that return nothing (`torch/csrc/inductor/aoti_torch/c/shim.h`): with a check around
one that is missing here, the source would not compile."""


@contextmanager
def operator_errors_are_raised() -> Iterator[None]:
    """Libraries that are compiled in this context look at the error code of every C function that they call, and keep
    the checks of torch.linalg, which are not dead code."""
    from torch._higher_order_ops.effects import _EffectType, _get_effect, _register_effectful_op
    from torch._inductor.codecache import AotCodeCompiler

    compile: Any = AotCodeCompiler.compile

    def checked(cls: Any, graph: Any, wrapper_code: str, *args: Any, **kwargs: Any) -> Any:
        return compile(graph, with_error_checks(wrapper_code), *args, **kwargs)

    registered = None
    if _get_effect(_LINALG_CHECK) is None:
        registered = _register_effectful_op(_LINALG_CHECK, _EffectType.ORDERED)
    try:
        with mock.patch.object(AotCodeCompiler, "compile", classmethod(checked)):
            yield
    finally:
        if registered is not None:
            registered.destroy()


def with_error_checks(source: str) -> str:
    """The C++ source with a check of the error code around each statement that is a call and drops the code."""
    parts, end = [], 0
    for statement in _STATEMENT.finditer(source):
        begin = statement.start("call")
        if statement["name"] in _NO_ERROR_CODE or begin < end:
            continue
        closed = _end_of_call(source, statement.end())
        if re.compile(r"\s*;").match(source, closed) is None:
            continue
        parts += [source[end:begin], f"AOTI_TORCH_ERROR_CODE_CHECK({source[begin:closed]})"]
        end = closed
    return "".join([*parts, source[end:]])


def _end_of_call(source: str, inside: int) -> int:
    """Where the call ends of which the first argument begins at `inside`."""
    depth = 1
    for token in _TOKEN.finditer(source, inside):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return len(source)
