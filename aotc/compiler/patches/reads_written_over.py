"""[inductor] What an operator reads is overwritten by the operator, or its result by the next.

A tensor that is not read later is written to in place, even if the written value, or the index, is in the same memory,
as in `x[index] = x[1:].clone()`, whose copy was removed. Then some rows are read after they were overwritten. torch
2.15 has fixed this (`should_reinplace_index_put` of its reinplace.py).

A part of a buffer is written in the buffer's memory even if the result is not the buffer's final value, as of `changed
= self.total.select_scatter(x, 0, 1)` before `self.total.copy_(y)`: `y` was returned as `changed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.operators import WRITES

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0027",
    operators=WRITES,
    upstream="pytorch#197829",
    torch=">=2.11,<2.15",
    targets=(
        "torch._inductor.fx_passes.reinplace:inplaceable_ops[aten.index_put.default]",
        "torch._inductor.fx_passes.reinplace:inplaceable_ops[aten._unsafe_index_put.default]",
        "torch._inductor.fx_passes.reinplace:inplaceable_ops[torch._inductor.fx_passes.reinplace:_generalized_scatter]",
    ),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, an operator that writes a part of a tensor does so in new memory if it also reads the tensor's
    memory, or if the tensor gets other values while the operator's result is still needed."""
    from torch._inductor.fx_passes import reinplace
    from torch._inductor.fx_utils import get_node_storage as storage_of

    writing = _writing()

    def reads_elsewhere(node: Any) -> bool:
        written, *read = node.args
        values = [value for value in pytree.tree_leaves((read, node.kwargs)) if isinstance(value, fx.Node)]
        return storage_of(written) not in {storage_of(value) for value in values}

    def gone_before_next_write(node: Any) -> bool:
        """Whether the result and its views are not read after other values are copied to their memory."""
        written, values = node.args[0], [node]
        for value in values:
            values += [user for user in value.users if user not in values and storage_of(user) == storage_of(node)]
        positions = {each: position for position, each in enumerate(node.graph.nodes)}
        last = max((positions[user] for value in values for user in value.users), default=0)
        return not any(
            user.target is torch.ops.aten.copy_.default
            and user.args[0] is written
            and positions[user] < last
            and node not in _written_over(user.args[1], writing)
            for user in written.users
        )

    def in_place(known: Any) -> Any:
        return dataclasses.replace(
            known,
            extra_check=lambda node: reads_elsewhere(node) and gone_before_next_write(node) and known.extra_check(node),
        )

    operators = {target: in_place(reinplace.inplaceable_ops[target]) for target in writing}
    with mock.patch.dict(reinplace.inplaceable_ops, operators):
        yield


def _writing() -> tuple[Any, ...]:
    """Operators that write a part of a tensor, in its memory."""
    from torch._inductor.fx_passes import reinplace

    aten = torch.ops.aten
    return aten.index_put.default, aten._unsafe_index_put.default, reinplace._generalized_scatter


def _written_over(value: Any, writing: Container[Any]) -> Iterator[fx.Node]:
    """A value, then its versions before each write to a part of it, newest first."""
    while isinstance(value, fx.Node):
        yield value
        value = value.args[0] if value.target in writing else None


def reproduce(patches: Torch) -> None:
    def function(total: Tensor, x: Tensor, index: Tensor) -> list[Tensor]:
        first, second = x.cos(), x.relu()
        first[index[:3]] = first[1:].clone()
        changed = total.select_scatter(x[0], 0, 1)
        total.copy_(x * 2)
        return [first, second.index_copy(0, index[:3], second[1:]), changed]

    assert_same(patches.compiled, function, torch.zeros(4, 6), torch.randn(4, 6), torch.tensor([3, 1, 0, 2]))
