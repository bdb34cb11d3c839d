"""What a condition or a loop of the model's is given.

Inductor compiles the branches of `torch.cond` for operands laid out as torch.export saw them, and decides then how they
lie in memory: inside a concatenation that they are a part of, say. The branches read them at the wrong places. Operands
of `torch.while_loop` have the layout that it is compiled for; here those of `torch.cond` have, too.

Where a whole tensor gets new values, as by `x[mask] = 0`, Inductor computes them in other memory, and lets what stands
for the tensor name that. An operand of `torch.cond` or `torch.while_loop` is still named by it when the code is
written: the branches were given the new values. torch 2.15 writes them to the old memory (`mutate_to` of its
lowering.py), after all that reads it; here operands have names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx


@contextmanager
def operands_keep_their_memory(condition: str) -> Iterator[None]:
    """Within, an operand of a condition or a loop stays the memory that it was when it was given.

    `condition` is Inductor's class of conditions: `Conditional`, and `Switch` in torch 2.14."""
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
        for kind in (getattr(ir, condition), ir.WhileLoop):
            patches.enter_context(mock.patch.object(kind, "__init__", with_own(kind.__init__)))
        yield


@contextmanager
def operands_lie_as_exported(condition: str) -> Iterator[None]:
    """Within, an operand of a condition, `cond` or `switch`, lies as its branches are compiled for."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    def laid_out(operand: Any, node: Any) -> Any:
        example = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(example, Tensor):
            return operand
        operand.realize()
        return ir.ExternKernel.require_exact_strides(operand, example.stride())

    def with_layouts(lower: Callable[..., Any]) -> Callable[..., Any]:
        def lower_laid_out(*args: Any) -> Any:
            *others, operands = args
            nodes: Any = V.graph.current_node.args[-1]
            return lower(*others, list(map(laid_out, operands, nodes)))

        return lower_laid_out

    table: dict[Any, Callable[..., Any]] = lowering.lowerings
    choice = getattr(torch.ops.higher_order, condition)
    with mock.patch.dict(table, {choice: with_layouts(table[choice])}):
        yield
