"""[inductor] A copy of an input is replaced by the input, to which the end of the graph writes.

There new values are written in the order of the inputs: `previous.copy_(current); current.copy_(x)` then copies the
value just written. torch 2.15 keeps copies of written tensors (`remove_noop_ops` of its post_grad.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0005",
    operators=("aten.copy_",),
    upstream="pytorch#198131",
    torch=">=2.11,<2.15",
    targets=("torch._inductor.fx_passes.post_grad:same_meta(node1, node2)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, a copy of a tensor that the graph writes to is not replaced by that tensor."""
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.fx_utils import get_node_storage as storage_of

    same_meta = post_grad.same_meta

    def interchangeable(node1: fx.Node, node2: fx.Node) -> bool:
        if not same_meta(node1, node2):
            return False
        storage = storage_of(node2)
        if storage == storage_of(node1):
            return True
        copies = node2.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        return storage not in {storage_of(copy.args[0]) for copy in copies}

    with replaced(post_grad, "same_meta", interchangeable):
        yield


def reproduce(patches: Torch) -> None:
    def function(current: Tensor, previous: Tensor, x: Tensor) -> Tensor:
        previous.copy_(current)
        current.copy_(x)
        return x * 2

    assert_same(patches.compiled, function, *torch.randn(3, 4))
