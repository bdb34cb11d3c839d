"""Operands of a condition (`torch.cond`, `switch`) or a loop, for each of Inductor's classes of conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from aotc.compiler.patches.machinery.replacing import replaced, replaced_entries
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same


@contextmanager
def operands_keep_their_memory(condition: str) -> Iterator[None]:
    """While active, an operand of a condition or a loop keeps its buffer of the time of the call.

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
            patches.enter_context(replaced(kind, "__init__", with_own(kind.__init__)))
        yield


@contextmanager
def operands_lie_as_exported(condition: str) -> Iterator[None]:
    """While active, operands of a condition (`cond`, `switch`) have the strides that its branches are compiled for."""
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
    with replaced_entries(table, {choice: with_layouts(table[choice])}):
        yield


def reproduce_memory_of_operands(patches: Torch) -> None:
    def function(x: Tensor) -> list[Tensor]:
        first = x @ x.mT
        chosen = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a * 2, (first,))
        first[first > 0] = 0.5
        return [chosen, first]

    assert_same(patches.compiled, function, torch.rand(4, 4))
