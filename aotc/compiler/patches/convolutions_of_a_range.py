"""[inductor] The layout of a convolution's result narrows the range of its batch.

Expected: no guard. Seen: with a batch that is tuned at 16 in a range of 1 to 16, `torch._C._select_conv_backend` guards
on `batch >= 16`, and AOTInductor's library takes only such batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from aotc.compiler.patches.machinery.patch import Patch

PATCH = Patch(
    __name__,
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

    with mock.patch.object(torch._C, "_select_conv_backend", selected):
        yield
