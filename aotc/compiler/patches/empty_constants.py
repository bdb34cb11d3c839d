"""[AOTInductor] Constants after one without elements are read from other places.

Expected: the model's. Seen: with `freezing`, the size of an empty view counts as its storage's in `data_size` of
`codegen/cpp_wrapper_cpu.py`, and as nothing in `_to_bytes` of `codecache.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch

PATCH = Patch(__name__, targets=("torch._inductor.graph:GraphLowering.allocate_non_dup_const_name(name, data)",))


@contextmanager
def apply() -> Iterator[None]:
    """While active, a constant without elements has its own storage, and is not a view of another."""
    from torch._inductor.graph import GraphLowering

    name_constant = GraphLowering.allocate_non_dup_const_name

    def name_own(graph: Any, name: str | None, data: Tensor) -> str:
        if data.layout is torch.strided and not data.numel():
            data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=data.device)
        return str(name_constant(graph, name, data))

    with mock.patch.object(GraphLowering, "allocate_non_dup_const_name", name_own):
        yield
