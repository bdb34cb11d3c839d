"""[AOTInductor] A `while_loop` that does not run returns its inputs.

Expected: tensors of their own, as `torch.compile` gives. Seen: what a caller writes to the result is in the input; or
the result is memory that Inductor reuses (`codegen_while_loop` of `codegen/cpp_wrapper_cpu.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch
from aotc.compiler.patches.shared.generated_code import check_count

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0017",
    complete=True,
    operators=("higher_order.",),
    targets=("torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu.codegen_while_loop(while_loop)",),
)

_BEGINS_AS = "aoti_torch_assign_tensors_out("


@contextmanager
def apply() -> Iterator[None]:
    """While active, code that is generated for a loop copies the initial values.

    Values that the loop's body writes to in place are not copied, since they are read from their own memory: the
    results of `scan` and `map`. Inductor knows that memory under a second name, too, and would reuse it while the first
    is still read.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.virtualized import V

    codegen: Any = CppWrapperCpu.codegen_while_loop

    def copying(self: Any, while_loop: Any, *args: Any, **kwargs: Any) -> None:
        writeline = self.writeline
        written = {name for output in while_loop.mutation_outputs for name in output.get_mutation_names()}
        V.graph.never_reuse_buffers.update(output.get_name() for output in while_loop.mutation_outputs)
        in_place = [value.get_name() in written for value in while_loop.carried_inputs]
        count, seen = len(in_place), 0

        def write(line: Any) -> None:
            nonlocal seen
            if isinstance(line, str) and _BEGINS_AS in line:
                if seen < count and not in_place[seen]:
                    line = line.replace(_BEGINS_AS, "aoti_torch_clone_preserve_strides(")
                seen += 1
            writeline(line)

        with mock.patch.object(self, "writeline", write):
            codegen(self, while_loop, *args, **kwargs)
        check_count("loops_without_iterations", min(seen, count), count)

    with replaced(CppWrapperCpu, "codegen_while_loop", copying):
        yield


def reproduce(patches: Torch) -> None:
    from torch._higher_order_ops import while_loop

    def function(x: Tensor) -> Any:
        loop: Any = while_loop
        return loop(lambda a: a.sum() > 100, lambda a: (a / 2,), (x,))

    x = torch.ones(4)
    (result,) = patches.library(function, x)(x)
    result.add_(100)
    assert x.sum() == 4, "what the caller writes to a result is in the input"
