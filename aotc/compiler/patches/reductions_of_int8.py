"""[inductor][cpu] Reductions of int8 and uint8 include lanes that hold no element.

Expected: `amin` of nine values from 2 to 20 is the smallest of them. Seen: 1. As many elements as a vector of float32
has are loaded, 8 with AVX2; of int8 a vector has 32 lanes, of which the load fills the others with 1 (elsewhere with
0). They become part of the accumulator, and `vec_reduce_all` reduces all lanes: `amin` of positive numbers, `amax` of
negative ones and a sum in int8 are wrong from 8 elements on (16 with AVX512). `argmin` and `argmax` read the indices of
the other lanes from memory that nothing has written.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0041",
    operators=(
        "aten.amin",
        "aten.amax",
        "aten.aminmax",
        "aten.argmin",
        "aten.argmax",
        "aten.min",
        "aten.max",
        "aten.sum",
    ),
    dtypes=("int8", "uint8"),
    device="cpu",
    upstream="pytorch#191499",
    targets=("torch._inductor.codegen.cpp:CppVecKernel.reduction(dtype, src_dtype, reduction_type, value)",),
)

_ALL_LANES = re.compile(r"at::vec::vec_reduce_all<(u?int8_t), 1>\((\[\].*\}), (\w+)\)")
_ALL_INDICES = re.compile(r"(argmin|argmax)_vec_reduce_all\((\w+)\)")

_INDEX = (
    "[&] {{ alignas(64) {type} values[decltype({vector}.value)::size()]; "
    "alignas(64) int64_t indices[decltype({vector}.index)::size()]; "
    "{vector}.value.store(values); {vector}.index.store(indices); "
    "IndexValue<{type}> found(indices[0], values[0]); "
    "for (int lane = 1; lane < {used}; ++lane) {kind}_combine(found, values[lane], indices[lane]); "
    "return found; }}()"
)


def apply() -> AbstractContextManager[Any]:
    """While active, reductions of int8 and uint8 end with the lanes that hold elements."""
    from torch._inductor.codegen.cpp import CppVecKernel

    reduce: Any = CppVecKernel.reduction

    def reduction(self: Any, dtype: Any, src_dtype: Any, reduction_type: Any, value: Any) -> Any:
        lines = self.reduction_suffix._lines
        known = len(lines)
        result = reduce(self, dtype, src_dtype, reduction_type, value)
        reduced = src_dtype if reduction_type in ("argmin", "argmax") else dtype
        if reduced in _TYPES and self.tiling_factor * 8 < self.vec_isa.bit_width():
            lines[known:] = [_of_used_lanes(line, _TYPES[reduced], self.tiling_factor) for line in lines[known:]]
        return result

    return replaced(CppVecKernel, "reduction", reduction)


_TYPES = {torch.int8: "int8_t", torch.uint8: "uint8_t"}


def _of_used_lanes(line: Any, type: str, used: int) -> Any:
    """The line that reduces a vector, of its first lanes; other lines as they are."""
    if not isinstance(line, str):
        return line
    line = _ALL_LANES.sub(rf"at::vec::vec_reduce_all<\1>(\2, \3, {used})", line)
    return _ALL_INDICES.sub(lambda found: _INDEX.format(kind=found[1], vector=found[2], type=type, used=used), line)


def reproduce(patches: Torch) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        largest = [each for value in (x, -x, y) for each in (value.amax(), value.argmax(), value.argmin())]
        return *largest, x.amin(), y.amin(), x.sum(dtype=torch.int8), x.reshape(5, 9).amin(1, keepdim=True)

    values = torch.arange(2, 47)
    assert_same(patches.compiled, function, values.to(torch.int8), values.to(torch.uint8))
