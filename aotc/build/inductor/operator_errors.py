"""What an operator of torch's or of the user's own raises is what the library raises, as in eager.

torch 2.13 sees to both; 2.11 and 2.12 do not, and a library goes on with whatever lies in its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_LINALG_CHECK = "aten::_linalg_check_errors"
"""The operator that raises for a matrix that cannot be factored, and gives nothing that others could use."""
_CALL = "aoti_torch_proxy_executor_call_function("
"""The C function that calls operators by name; it returns an error code."""


@contextmanager
def operator_errors_are_raised() -> Iterator[None]:
    """Libraries that are compiled in this context look at the error codes of operators that they call by name, and keep
    the checks of torch.linalg, which are no dead code."""
    from torch._higher_order_ops.effects import _EffectType, _get_effect, _register_effectful_op
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    writeline: Any = CppWrapperCpu.writeline

    def checked(self: Any, line: Any) -> None:
        if isinstance(line, str) and line.startswith(_CALL):
            line = f"AOTI_TORCH_ERROR_CODE_CHECK({line.removesuffix(';')});"
        writeline(self, line)

    registered = None
    if _get_effect(_LINALG_CHECK) is None:
        registered = _register_effectful_op(_LINALG_CHECK, _EffectType.ORDERED)
    try:
        with mock.patch.object(CppWrapperCpu, "writeline", checked):
            yield
    finally:
        if registered is not None:
            registered.destroy()
