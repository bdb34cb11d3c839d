"""Products with int8 weights on a CPU, which Inductor makes of `(x @ weight.to(x.dtype).mT) * scale`.

torch's kernel reads bfloat16 rows of `x` with instructions that end the process at an address that is not a multiple of
32. Memory that torch allocates is such a multiple; a caller's slice need not be, nor a part of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def operands_are_aligned() -> Iterator[None]:
    """Within, the first operand is copied where it is an input or begins within another tensor."""
    from torch._inductor import ir
    from torch._inductor import quantized_lowerings as imported
    from torch._inductor.virtualized import V

    quantized_lowerings: Any = imported

    def aligning(operands: Callable[..., Any]) -> Callable[..., Any]:
        def aligned(*args: Any, **kwargs: Any) -> Any:
            *sizes, x, weight = operands(*args, **kwargs)
            if x.get_name() in V.graph.graph_inputs or x.get_layout().offset != 0:
                x = ir.ExternKernel.copy_input(x)
            return *sizes, x, weight

        return aligned

    with mock.patch.object(quantized_lowerings, "mm_args", aligning(quantized_lowerings.mm_args)):
        yield
