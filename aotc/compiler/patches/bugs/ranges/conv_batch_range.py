"""Convolutions whose batch has a range of sizes.

Which code of torch's a convolution is for depends on the batch's size too (on a CPU: 16 or more), and Inductor asks,
for the layout of the result. A fake tensor answers for the size that is tuned at, and torch narrows the range by the
answer, though torch.export has said for which sizes the graph is: tuned at 16 of 1 to 16, each call was of 16 images.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch


@contextmanager
def batches_stay_open() -> Iterator[None]:
    """Within, what a convolution's sizes are taken for says nothing of the sizes that they may have."""
    select: Any = torch._C._select_conv_backend

    def selected(*args: Any, **kwargs: Any) -> Any:
        images = args[0] if args else kwargs["input"]  # torch 2.11 names it
        shape_env = next((size.node.shape_env for size in images.shape if isinstance(size, torch.SymInt)), None)
        with shape_env.suppress_guards() if shape_env else nullcontext():
            return select(*args, **kwargs)

    with mock.patch.object(torch._C, "_select_conv_backend", selected):
        yield
