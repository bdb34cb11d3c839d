"""Operators with a `device` argument create their tensor on the GPU on which the library runs.

`torch.hann_window(400, device=x.device)` is a call of torch's own operator, and Inductor (torch 2.11, 2.13) compiles in
the index of the build's GPU: on another GPU of the service, kernels would read another GPU's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def tensors_made_on_own_gpu() -> Iterator[None]:
    """While active, generated wrappers refer to the model's GPU as the library's own device, not by its index."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.virtualized import V

    codegen_device: Any = CppWrapperCpu.codegen_device

    def own_device(self: Any, device: Any) -> str:
        kind, _, index = str(codegen_device(self, device)).partition(", ")
        own = device.type == "cuda" and device.index in (None, *list(V.graph.device_idxs)[:1])
        return f"{kind}, {'this->device_idx_' if own and V.graph.aot_mode else index}"

    with mock.patch.object(CppWrapperCpu, "codegen_device", own_device):
        yield
