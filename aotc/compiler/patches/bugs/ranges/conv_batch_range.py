"""Convolutions whose batch has a range of sizes.

torch's backend for a convolution also depends on the batch's size (on a CPU: 16 or more), and Inductor asks for it, to
get the layout of the result. The answer is for the size of autotuning, and torch narrows the range by it, though the
exported range is fixed: tuned at 16 in a range of 1 to 16, each call had to have 16 images.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch


@contextmanager
def batches_stay_open() -> Iterator[None]:
    """While active, choosing the backend of a convolution does not narrow the range of its sizes."""
    select: Any = torch._C._select_conv_backend

    def selected(*args: Any, **kwargs: Any) -> Any:
        images = args[0] if args else kwargs["input"]  # torch 2.11 names it
        shape_env = next((size.node.shape_env for size in images.shape if isinstance(size, torch.SymInt)), None)
        with shape_env.suppress_guards() if shape_env else nullcontext():
            return select(*args, **kwargs)

    with mock.patch.object(torch._C, "_select_conv_backend", selected):
        yield
