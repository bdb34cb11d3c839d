"""[inductor] The layout of a convolution's result narrows the range of its batch.

Expected: no guard. Seen: with a batch that is tuned at 16 in a range of 1 to 16, `torch._C._select_conv_backend` guards
on `batch >= 16`, and AOTInductor's library takes only such batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch

PATCH = Patch(
    __name__,
    severity="crash",
    advisory="AOTC-2026-0004",
    only=("range",),
    complete=True,
    operators=(
        "aten.conv",
        "aten._conv",
        "aten.cudnn_conv",
        "aten.mkldnn_conv",
    ),
    targets=("torch:_C._select_conv_backend",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, choosing the backend of a convolution does not narrow the range of its sizes.

    The backend also depends on the batch's size (on a CPU: 16 or more), and Inductor asks for it to get the layout of
    the result. The answer is for the size of autotuning.
    """
    select: Any = torch._C._select_conv_backend

    def selected(*args: Any, **kwargs: Any) -> Any:
        images = args[0] if args else kwargs["input"]  # torch 2.11 names it
        shape_env = next((size.node.shape_env for size in images.shape if isinstance(size, torch.SymInt)), None)
        with shape_env.suppress_guards() if shape_env else nullcontext():
            return select(*args, **kwargs)

    with replaced(torch._C, "_select_conv_backend", selected):
        yield


def reproduce(patches: Torch) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    make_context: Any = StatelessSymbolicContext
    context = make_context([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])
    images = mode.from_tensor(torch.randn(16, 4, 8, 8), symbolic_context=context)
    weight = mode.from_tensor(torch.randn(4, 4, 3, 3))
    select: Any = torch._C
    with patches.patched("compile"), mode:
        select._select_conv_backend(images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [0])
    assert not environment.guards, "the range of the batch is narrower than it was"
