"""[AOTInductor] Errors of torch's and the user's operators are dropped.

A library calls operators through torch's C functions, which catch exceptions and return an error code. Inductor
generates some of these calls (`scatter_add`, `index_put`, the copy of a returned constant; with torch 2.11 and 2.12 the
user's own operators, too) as statements that drop the code: the library would continue with a partial result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_raises

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0024",
    upstream="pytorch#190909",
    torch=">=2.11,<2.14",
    targets=(
        "torch._inductor.codecache:AotCodeCompiler.compile(graph, wrapper_code, ...)",
        "torch._higher_order_ops.effects:_register_effectful_op(op, effect)",
    ),
)

_LINALG_CHECK = "aten::_linalg_check_errors"
"""The operator that raises an error for a matrix that cannot be factored; it has no result."""

_STATEMENT = re.compile(
    r"(?:[;{})]|\belse\b|^\s*#[^\n]*\n|\A)(?:\s|//[^\n]*\n)*(?P<call>\baoti_torch_(?P<name>\w+)\s*\()", re.MULTILINE
)
"""The beginning of a statement that calls one of torch's C functions."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|[()]')

_NO_ERROR_CODE = ("print_tensor_handle", "save_tensor_handle", "check", "warn", "grad_mode_set_enabled")
"""torch's C functions without an error code (`torch/csrc/inductor/aoti_torch/c/shim.h`). If one were missing here, the
source with a check around its call would not compile."""


@contextmanager
def apply() -> Iterator[None]:
    """While active, compiled libraries check the error code of every C function that they call, and the checks of
    torch.linalg are not removed as dead code.

    The final source is read once, and every statement that drops a code gets the check, whichever part of Inductor
    generated it.
    """
    from torch._higher_order_ops.effects import _EffectType, _get_effect, _register_effectful_op
    from torch._inductor.codecache import AotCodeCompiler

    compile: Any = AotCodeCompiler.compile

    def checked(cls: Any, graph: Any, wrapper_code: str, *args: Any, **kwargs: Any) -> Any:
        return compile(graph, with_error_checks(wrapper_code), *args, **kwargs)

    registered = None
    if _get_effect(_LINALG_CHECK) is None:
        registered = _register_effectful_op(_LINALG_CHECK, _EffectType.ORDERED)
    try:
        with replaced(AotCodeCompiler, "compile", checked):
            yield
    finally:
        if registered is not None:
            registered.destroy()


def with_error_checks(source: str) -> str:
    """The C++ source with a check around each statement that drops the error code of a call."""
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
    """The end of the call whose first argument begins at `inside`."""
    depth = 1
    for token in _TOKEN.finditer(source, inside):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return len(source)


def reproduce(patches: Torch) -> None:
    x, index = torch.randn(8, 8), torch.zeros(8, 8, dtype=torch.int64)
    compiled = patches.library(lambda x, index: torch.zeros(8, 8).scatter_add(0, index, x), x, index)
    index[7, 7] = 8
    assert_raises(lambda: compiled(x, index))
