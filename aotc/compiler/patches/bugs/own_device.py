"""Operators that are told on which GPU to make a tensor make it on the one that the library runs on.

`torch.hann_window(400, device=x.device)` is a call of torch's own operator, and Inductor (torch 2.11, 2.13) writes the
number of the build's GPU into it: on another one of the service's, kernels would read another GPU's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def tensors_made_on_own_gpu() -> Iterator[None]:
    """Have the wrappers that are generated in this context name the GPU that a model is on as the library's own."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.virtualized import V

    codegen_device: Any = CppWrapperCpu.codegen_device

    def own_device(self: Any, device: Any) -> str:
        kind, _, index = str(codegen_device(self, device)).partition(", ")
        own = device.type == "cuda" and device.index in (None, *list(V.graph.device_idxs)[:1])
        return f"{kind}, {'this->device_idx_' if own and V.graph.aot_mode else index}"

    with mock.patch.object(CppWrapperCpu, "codegen_device", own_device):
        yield
