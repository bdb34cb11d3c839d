"""What a condition or a loop of the model's is given, where the model writes to it afterwards.

Where a whole tensor gets new values, as by `x[mask] = 0`, Inductor computes them in other memory, and lets what stands
for the tensor name that. An operand of `torch.cond` or `torch.while_loop` is still named by it when the code is
written: the branches were given the new values. torch 2.15 writes them to the old memory (`mutate_to` of its
lowering.py), after all that reads it, and has these classes elsewhere; here operands have names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def operands_keep_their_values() -> Iterator[None]:
    """Within, an operand of a condition or a loop stays the memory that it was when it was given."""
    from torch._inductor import ir

    def own(given: Any) -> Any:
        if isinstance(given, list | tuple):
            return [own(each) for each in given]
        if isinstance(given, ir.TensorBox | ir.StorageBox):
            return type(given)(own(given.data))
        if isinstance(given, ir.ReinterpretView):
            return ir.ReinterpretView(data=own(given.data), layout=given.layout)
        return given

    def with_own(init: Callable[..., None]) -> Callable[..., None]:
        def make(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *map(own, args), **{name: own(value) for name, value in kwargs.items()})

        return make

    with ExitStack() as patches:
        for name in ("Conditional", "WhileLoop"):
            if kind := getattr(ir, name, None):
                patches.enter_context(mock.patch.object(kind, "__init__", with_own(kind.__init__)))
        yield
