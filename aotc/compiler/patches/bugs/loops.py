"""What a loop of the model's returns where its condition is false at once.

A library begins such a loop (`torch.while_loop`) with the initial values themselves, under other names. After no
iteration these are the results: memory that Inductor uses again for what comes next, or an input or a weight. The code
that `torch.compile` generates copies them then; here each loop begins with copies.

But not of what the loop's body writes to in place, which is read where it was made: the results of `scan` and `map`.
Inductor lists that memory under a second name, too, and would use it again while the first is still read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_BEGINS_AS = "aoti_torch_assign_tensors_out("


@contextmanager
def loops_begin_with_copies() -> Iterator[None]:
    """Within, code that is generated for a loop copies the initial values."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.virtualized import V

    codegen: Any = CppWrapperCpu.codegen_while_loop

    def copying(self: Any, loop: Any, *args: Any, **kwargs: Any) -> None:
        writeline = self.writeline
        written = {name for output in loop.mutation_outputs for name in output.get_mutation_names()}
        V.graph.never_reuse_buffers.update(output.get_name() for output in loop.mutation_outputs)
        in_place = [value.get_name() in written for value in loop.carried_inputs]

        def write(line: Any) -> None:
            if in_place and isinstance(line, str) and _BEGINS_AS in line and not in_place.pop(0):
                line = line.replace(_BEGINS_AS, "aoti_torch_clone_preserve_strides(")
            writeline(line)

        with mock.patch.object(self, "writeline", write):
            codegen(self, loop, *args, **kwargs)

    with mock.patch.object(CppWrapperCpu, "codegen_while_loop", copying):
        yield
