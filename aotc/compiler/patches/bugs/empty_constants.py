"""Constants without elements: frozen weights, or tensors that are computed from them.

AOTInductor writes no bytes for such a constant, but counts the whole storage of which it is a view: each constant after
it was read from a wrong place (`data_size` of its cpp_wrapper_cpu.py, against `_to_bytes` of its codecache.py), in
torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@contextmanager
def empty_constants_have_no_memory() -> Iterator[None]:
    """While active, a constant without elements has its own storage, and is not a view of another."""
    from torch._inductor.graph import GraphLowering

    name_constant = GraphLowering.allocate_non_dup_const_name

    def name_own(graph: Any, name: str | None, data: Tensor) -> str:
        if data.layout is torch.strided and not data.numel():
            data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=data.device)
        return str(name_constant(graph, name, data))

    with mock.patch.object(GraphLowering, "allocate_non_dup_const_name", name_own):
        yield
