"""Has the tensor memory accelerator round what it loads for TF32 products, in kernels that ask for it.

Tensor cores ignore the lower 13 bits of a float32. What is copied to them unchanged is so cut off, always toward zero,
and a product's largest error is 2.5 to 3 times as large as with rounded operands, which cuBLAS has (Triton 3.6, H200).
A tensor map of type tf32 rounds while it loads, and costs no time. Triton writes maps of type f32 and offers no other,
so they are changed in the PTX: the field `elemtype` (CUDA's PTX ISA manual, "tensormap.replace").

Only a kernel's source travels to Inductor's processes that compile. Hence a kernel asks by calling
`loads_round_to_tf32`, and what it must import for that changes the PTX, wherever it is compiled.
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
    """In a kernel: whatever it loads through tensor descriptors of float32 is rounded to TF32."""
    tl.inline_asm_elementwise("// aotc: loads round to TF32\nmov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)


def with_rounding_maps(ptx: str) -> str:
    """The PTX with tensor maps of tf32 instead of f32, if its kernel asked for them.

    Raises RuntimeError if it has none: its products would be less exact than the TF32 format allows.
    """
    if _ASKED not in ptx:
        return ptx
    rounding, maps = _MAP_OF_F32.subn(rf"\g<1>{_TF32};", ptx)
    if not maps:
        raise RuntimeError(f"Triton {triton.__version__} writes tensor maps in a way that aotc does not know")
    return rounding


def _change_ptx() -> None:
    earlier: Any = knobs.runtime.add_stages_inspection_hook

    def hook(*arguments: Any) -> Any:
        """Triton gives (backend, stages, options, language, capability); from 3.7 on it also asks, with nothing, what
        this adds to a kernel's key: a kernel's source already says whether it asks."""
        answer = earlier(*arguments) if earlier else ("", "")
        if arguments:
            stages = arguments[1]
            to_ptx = stages["ptx"]
            stages["ptx"] = lambda source, metadata: with_rounding_maps(to_ptx(source, metadata))
        return answer

    knobs.runtime.add_stages_inspection_hook = hook


_change_ptx()
