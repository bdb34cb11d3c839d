"""[AOTInductor] Scratch memory for a kernel's tensor maps is of one program.

Expected: of every program of the grid, each of which writes its tensor maps there if the kernel calls
`tl.make_tensor_descriptor`. Seen: the other programs write beyond it, over other small tensors (`cpp_scratch` of
`codegen/cuda/device_op_overrides.py`). Mended in torch 2.12.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.shared.generated_code import rewritten
from aotc.compiler.patches.shared.operators import PRODUCTS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0031",
    operators=(*PRODUCTS, "higher_order.triton_kernel"),
    torch=">=2.11,<2.12",
    device="cuda",
    targets=("torch._inductor.codegen.cuda.device_op_overrides:CUDADeviceOpOverrides.cpp_scratch(idx, workspace)",),
)

_OF_ONE_PROGRAM = re.compile(r"(scratch_\d+_size\[\] = \{)(\d+)(\};)")

_OF_ALL = r"\1static_cast<int64_t>(\2) * grid_0 * grid_1 * grid_2\3"


@contextmanager
def apply() -> Iterator[None]:
    """While active, generated launchers allocate scratch memory for the whole grid."""
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    allocation: Any = CUDADeviceOpOverrides.cpp_scratch

    def for_every_program(self: Any, idx: int, workspace: Any, *args: Any, **kwargs: Any) -> Any:
        lines, name = allocation(self, idx, workspace, *args, **kwargs)
        if not workspace.size:
            return lines, name
        return rewritten("scratch_of_one_program", _OF_ONE_PROGRAM, _OF_ALL, "\n".join(lines)).split("\n"), name

    with replaced(CUDADeviceOpOverrides, "cpp_scratch", for_every_program):
        yield
