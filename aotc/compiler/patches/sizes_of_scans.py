"""[inductor] `scan` and `map` over ranges of sizes end with a `KeyError: s17`.

The pass that writes them as a `while_loop` computes the sizes of their results from the numbers among their arguments,
and the sizes of the tensors among them are not looked at: `KeyError: s17`. Dynamo passes these sizes as numbers,
torch.export does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch
from aotc.compiler.patches.shared.inductor import inductor

PATCH = Patch(
    __name__,
    severity="build",
    operators=("higher_order.scan", "higher_order.map"),
    complete=True,
    targets=("torch._inductor.fx_passes.post_grad:resolve_shape_to_proxy(shape, bound_symbols)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, sizes that are not among the arguments are given as symbols, which the tracer knows of its
    inputs."""
    passes = inductor("fx_passes.post_grad")
    resolve = passes.resolve_shape_to_proxy

    def resolved(shape: Any, bound_symbols: dict[Any, Any]) -> Any:
        nodes = [size.node for size in shape if isinstance(size, torch.SymInt)]
        symbols = {symbol: node.shape_env for node in nodes for symbol in node.expr.free_symbols}
        known = {symbol: env.create_symintnode(symbol, hint=None) for symbol, env in symbols.items()}
        return resolve(shape, {**known, **bound_symbols})

    with replaced(passes, "resolve_shape_to_proxy", resolved):
        yield


def reproduce(patches: Torch) -> None:
    from torch._higher_order_ops.scan import scan

    def function(x: Tensor, y: Tensor) -> Tensor:
        def step(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            return carried.clone(), (carried - row).sum(1)

        _, differences = scan(step, y, x, dim=0)
        return cast("Tensor", differences)

    rows = [{0: torch.export.Dim(name, min=2, max=8)} for name in ("of_x", "of_y")]
    library = patches.library(function, torch.randn(4, 3), torch.randn(5, 3), shapes=rows)
    x, y = torch.randn(7, 3), torch.randn(2, 3)
    torch.testing.assert_close(library(x, y)[0], function(x, y))
