"""Templates that load by the tensor memory accelerator, as candidates of matrix products on tensor cores only.

In plain float32 the ordinary cores multiply, whose speed these templates do not raise, and the compiler writes out
every multiplication of a tile: for tiles of their sizes half a minute of it, where any other template takes four
seconds (torch 2.11, Hopper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from aotc.build.autotuning.hooks import inductor


@contextmanager
def tma_templates_on_tensor_cores_only() -> Iterator[None]:
    """Leave these templates out of races between implementations of a plain float32 product."""
    mm = inductor("kernel.mm")
    with ExitStack() as patches:
        for name in ("use_triton_tma_template", "use_triton_blackwell_tma_template"):
            patches.enter_context(mock.patch.object(mm, name, _on_tensor_cores_only(getattr(mm, name))))
        yield


def _on_tensor_cores_only(usable: Callable[..., bool]) -> Callable[..., bool]:
    def usable_and_of_use(*matrices: Any, **kwargs: Any) -> bool:
        return _on_tensor_cores(matrices[0].get_dtype()) and usable(*matrices, **kwargs)

    return usable_and_of_use


def _on_tensor_cores(dtype: torch.dtype) -> bool:
    return dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
