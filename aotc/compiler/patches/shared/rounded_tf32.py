"""Make the tensor memory accelerator round the operands of TF32 products, in kernels that request it.

Tensor cores ignore the lower 13 bits of a float32. Unrounded operands are truncated toward zero, and a product's
largest error is 2.5 to 3 times as large as with rounded operands, which cuBLAS uses (Triton 3.6, H200). A tensor map of
type tf32 rounds while it loads, at no cost. Triton only generates maps of type f32, so the PTX is changed: the field
`elemtype` (CUDA's PTX ISA manual, "tensormap.replace").

Only a kernel's source is sent to Inductor's compile processes. So a kernel makes the request by a call of
`loads_round_to_tf32`, and importing this module, which the call needs, installs the change of PTX in any process.
"""

from __future__ import annotations

import re
from typing import Any

import triton
import triton.language as tl
from triton import knobs

_ASKED = "// aotc: loads round to TF32"
_MAP_OF_F32 = re.compile(r"(tensormap\.replace\.tile\.elemtype\.\S+\s+\[[^]]*\],\s*)0x7;")
_TF32 = "0xb"


@triton.jit
def loads_round_to_tf32():  # type: ignore[no-untyped-def]
    """Called in a kernel: its loads through tensor descriptors of float32 are rounded to TF32."""
    tl.inline_asm_elementwise("// aotc: loads round to TF32\nmov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)


def with_rounding_maps(ptx: str) -> str:
    """The PTX with tensor maps of tf32 instead of f32, if its kernel has requested them.

    Raises RuntimeError if it has no such maps: its products would be less exact than the TF32 format allows.
    """
    if _ASKED not in ptx:
        return ptx
    rounding, maps = _MAP_OF_F32.subn(rf"\g<1>{_TF32};", ptx)
    if not maps:
        raise RuntimeError(f"Triton {triton.__version__} generates tensor maps in a form that aotc does not know")
    return rounding


def _change_ptx() -> None:
    earlier: Any = knobs.runtime.add_stages_inspection_hook

    def hook(*arguments: Any) -> Any:
        """Triton calls this with (backend, stages, options, language, capability); from 3.7 on also without arguments,
        for the hook's part of a kernel's key: nothing, since the kernel's source contains the request."""
        answer = earlier(*arguments) if earlier else ("", "")
        if arguments:
            stages = arguments[1]
            to_ptx = stages["ptx"]
            stages["ptx"] = lambda source, metadata: with_rounding_maps(to_ptx(source, metadata))
        return answer

    knobs.runtime.add_stages_inspection_hook = hook


_change_ptx()
