"""An index that is out of bounds is an error of the call, not the end of the process.

Inductor's C++ kernels check each index that comes from a tensor, and throw. Most of their loops are OpenMP's, which no
exception may leave: a token id that is none would end the service, where eager raises an error. So such a check takes
note and goes on with index 0, and the kernel throws when its loops are done.

Left as they are: checks of an expression of several values, of which 0 need not be within bounds, and those in the
epilogue of a matrix product's template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_CHECK = re.compile(
    r'AOTI_TORCH_CHECK\((?P<condition>.*), (?P<message>"index out of bounds: [^"]*")\) '
    r"/\* index: (?P<index>tmp\d+) \*/;"
)
_NOTES = (
    r"if (C10_UNLIKELY(!(\g<condition>))) { index_error.store(\g<message>, std::memory_order_relaxed); "
    r"\g<index> = decltype(\g<index>)(0); }"
)
_BEGIN = "\n    std::atomic<const char*> index_error{nullptr};"
_END = "    if (const char* message = index_error.load()) throw std::out_of_range(message);\n"

_OR_MASKED_OUT = " | ~("
"""Of a C++ bool this is true, whatever the bool: such a check of Inductor's (torch 2.11, 2.13) never fails, and what
lies outside is read. Of a vector's mask it is right."""


@contextmanager
def index_errors_are_raised() -> Iterator[None]:
    """Let C++ kernels that are generated in this context throw for an index only where it can be caught."""
    import sympy  # type: ignore[import-untyped]
    from torch._inductor.codegen.cpp import CppKernel, KernelGroup
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    check_bounds: Any = CppKernel.check_bounds
    codegen_group: Any = KernelGroup.codegen_group

    def check(self: Any, expression: Any, *args: Any, **kwargs: Any) -> None:
        asserted = self.indirect_assert
        named = isinstance(expression, sympy.Symbol) and symbol_is_type(expression, SymT.TMP)

        def assertion(index: Any, *given: Any, **more: Any) -> str:
            line = str(asserted(index, *given, **more))
            if not index.is_vec:
                line = line.replace(_OR_MASKED_OUT, " | !(", 1)
            return f"{line} /* index: {expression} */" if named else line

        with mock.patch.object(self, "indirect_assert", assertion):
            check_bounds(self, expression, *args, **kwargs)

    def throws_in_the_end(self: Any, *args: Any, **kwargs: Any) -> str:
        code, count = _CHECK.subn(_NOTES, codegen_group(self, *args, **kwargs))
        if not count:
            return code
        begin, end = code.index("{") + 1, code.rindex("}")
        return f"{code[:begin]}{_BEGIN}{code[begin:end]}{_END}{code[end:]}"

    with (
        mock.patch.object(CppKernel, "check_bounds", check),
        mock.patch.object(KernelGroup, "codegen_group", throws_in_the_end),
    ):
        yield
