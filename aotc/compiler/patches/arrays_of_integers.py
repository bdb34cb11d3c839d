"""An array of integers is written once for each writer of code.

torch 2.11 stores arrays by the id of a bound method, which lives for one call only: whether an id is reused is chance.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced

PATCH = Patch(
    __name__,
    kind="determinism",
    torch=">=2.11,<2.13",
    targets=("torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu.codegen_int_array_var(int_array, writeline)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, arrays are stored by the owner of the method that writes them."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    array: Any = CppWrapperCpu.codegen_int_array_var
    writers: dict[int, Any] = {}

    def of_writer(self: Any, int_array: str, writeline: Any, *args: Any, **kwargs: Any) -> str:
        owner = getattr(writeline, "__self__", writeline)
        return str(array(self, int_array, writers.setdefault(id(owner), writeline), *args, **kwargs))

    return replaced(CppWrapperCpu, "codegen_int_array_var", of_writer)
