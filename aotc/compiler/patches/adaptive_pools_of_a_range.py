"""[inductor] Adaptive pooling of a range is for the size that it is tuned at.

Expected: the window of each image's height and width. Seen: that of the example's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced_entries
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0001",
    only=("range",),
    complete=True,
    operators=(
        "aten.adaptive_",
        "aten._adaptive_",
    ),
    targets=(
        "torch._inductor.lowering:lowerings[aten._adaptive_avg_pool2d.default]",
        "torch._inductor.lowering:lowerings[aten.adaptive_max_pool2d.default]",
        "aten.adaptive_max_pool2d.default(self, output_size)",
        "aten.adaptive_max_pool3d.default(self, output_size)",
        "torch._inductor.lowering:fallback_adaptive_avg_pool2d",
        "torch._inductor.lowering:fallback_adaptive_max_pool2d",
    ),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, adaptive pooling of images without fixed sizes calls torch's operator, which supports any size."""
    from torch._inductor import decomposition, lowering

    aten = torch.ops.aten
    average, flat, solid = (
        getattr(aten, name).default for name in ("_adaptive_avg_pool2d", "adaptive_max_pool2d", "adaptive_max_pool3d")
    )
    replaced: list[tuple[dict[Any, Any], Any, Callable[..., Any]]] = [
        (lowering.lowerings, average, lowering.fallback_adaptive_avg_pool2d),
        (lowering.lowerings, flat, lowering.fallback_adaptive_max_pool2d),
        *(
            (table, operator, _largest_of_all)
            for table in (decomposition.decompositions, decomposition.fast_random_decomps())
            for operator in (flat, solid)
            if operator in table
        ),
    ]
    with ExitStack() as patches:
        for table, operator, for_open in replaced:
            patches.enter_context(replaced_entries(table, {operator: _by_size(table[operator], for_open)}))
        yield


def _by_size(for_fixed: Callable[..., Any], for_open: Callable[..., Any]) -> Callable[..., Any]:
    import sympy  # type: ignore[import-untyped]

    def pool(image: Any, output_size: Sequence[int]) -> Any:
        sizes = image.shape if isinstance(image, Tensor) else image.get_size()
        fixed = all(isinstance(size, int | sympy.Integer) for size in sizes[-len(output_size) :])
        return (for_fixed if fixed else for_open)(image, output_size)

    return pool


def _largest_of_all(image: Tensor, output_size: Sequence[int]) -> Any:
    """The maximum of each image and its index, for an output size of 1; NotImplemented for other output sizes."""
    if any(size != 1 for size in output_size):
        return NotImplemented
    values = image.amax([*range(-len(output_size), 0)], keepdim=True)
    return values, image.flatten(-len(output_size)).argmax(-1).view_as(values)


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 3)

    shapes = [{2: torch.export.Dim("height", min=4, max=32)}]
    compiled = patches.library(function, torch.randn(1, 1, 9, 8), shapes=shapes)
    x = torch.randn(1, 1, 31, 8)
    torch.testing.assert_close(compiled(x)[0], function(x))
