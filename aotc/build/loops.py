"""What a loop of the model's returns where its condition is false at once.

A library begins such a loop (`torch.while_loop`) with the initial values themselves, under other names. After no
iteration these are the results: memory that Inductor uses again for what comes next, or an input or a weight. The code
that `torch.compile` generates copies them then; here each loop begins with copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def loops_begin_with_copies() -> Iterator[None]:
    """Within, code that is generated for a loop copies the initial values."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    codegen: Any = CppWrapperCpu.codegen_while_loop

    def copying(self: Any, *args: Any, **kwargs: Any) -> None:
        writeline = self.writeline
        begun = False

        def write(line: Any) -> None:
            nonlocal begun
            begun = begun or line == "while (1) {"
            if isinstance(line, str) and not begun:
                line = line.replace("aoti_torch_assign_tensors_out(", "aoti_torch_clone_preserve_strides(")
            writeline(line)

        with mock.patch.object(self, "writeline", write):
            codegen(self, *args, **kwargs)

    with mock.patch.object(CppWrapperCpu, "codegen_while_loop", copying):
        yield
