"""What a frozen model computes from weights and constructors, like `arange`, is computed by the build.

Inductor leaves constructors to the generated code, which computes them at no cost. So it also leaves there what is
computed from them and from weights: the position embeddings that YOLOS resizes by `interpolate`, the rows that `arange`
takes from a table, tables of sines. With this patch, the build computes such a tensor if its size is at most 1 MiB, or
at most that of the largest weight that it is made of. What is made of constructors alone stays in the generated code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced

PATCH = Patch(
    __name__,
    kind="performance",
    device="cpu",
    targets=(
        "torch._inductor.constant_folding:ConstantFolder(gm, skip_constructors)",
        "torch._inductor.constant_folding:ConstantFolder._deduce_value(node)",
        "torch._inductor.constant_folding:ConstantFolder.add_node_replacement(node, tensor)",
    ),
)

_SMALL = 2**20
"""Bytes of a constant that is folded whatever it is made of."""


@contextmanager
def apply() -> Iterator[None]:
    """While active, freezing folds what is computed from weights and constructors."""
    from torch._inductor import constant_folding
    from torch._inductor.fx_passes import joint_graph  # noqa: F401  (its import makes a subclass of today's folder)

    Folder: Any = constant_folding.ConstantFolder

    class ConstructorFolder(Folder):  # type: ignore[misc]
        def __init__(self, gm: fx.GraphModule, skip_constructors: bool = False, *args: Any, **kwargs: Any) -> None:
            super().__init__(gm, False, *args, **kwargs)
            self.weight_bytes: dict[fx.Node, int] = {}  # of the largest weight that a node is made of
            self.constructed: set[fx.Node] = set()  # constructors, and what is made of them

        def _deduce_value(self, node: fx.Node) -> Any:
            sources = node.all_input_nodes
            self.weight_bytes[node] = max((self.weight_bytes.get(source, 0) for source in sources), default=0)
            if node.op == "get_attr":
                value = super()._deduce_value(node)
                self.weight_bytes[node] = _bytes(value)
                return value
            if not sources or any(source in self.constructed for source in sources):
                if not sources and getattr(node.target, "namespace", "") not in ("aten", "prims"):
                    return self.unknown_value
                self.constructed.add(node)
                if _bytes(node.meta.get("val")) > max(_SMALL, self.weight_bytes[node]):
                    return self.unknown_value
            return super()._deduce_value(node)

        def add_node_replacement(self, node: fx.Node, tensor: Tensor) -> None:
            if self.weight_bytes[node]:
                super().add_node_replacement(node, tensor)

    with replaced(constant_folding, "ConstantFolder", ConstructorFolder):
        yield


def _bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
