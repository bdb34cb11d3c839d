"""[AOTInductor] An operator that is given a device makes its result on the build's GPU.

Expected: on `device_index` of the loader. Seen: the number of the build's GPU is in the code
(`CppWrapperCpu.codegen_device`), and on another GPU kernels read that one's memory.

    def f(x):
        return torch.hann_window(400, device=x.device) * x
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0008",
    device="cuda",
    targets=("torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu.codegen_device(device)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, generated wrappers refer to the model's GPU as the library's own device, not by its index."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.virtualized import V

    codegen_device: Any = CppWrapperCpu.codegen_device

    def own_device(self: Any, device: Any) -> str:
        kind, _, index = str(codegen_device(self, device)).partition(", ")
        own = device.type == "cuda" and device.index in (None, *list(V.graph.device_idxs)[:1])
        return f"{kind}, {'this->device_idx_' if own and V.graph.aot_mode else index}"

    with replaced(CppWrapperCpu, "codegen_device", own_device):
        yield
