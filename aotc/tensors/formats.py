"""Dtypes and layouts by their names in records and checkpoints, without torch."""

from __future__ import annotations

from collections.abc import Sequence

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""The dtypes of the safetensors format → torch's names."""


def torch_name(dtype: str) -> str:
    """Torch's name of a dtype of safetensors; an unknown one is returned as it is."""
    return DTYPES.get(dtype, dtype)


def strides_in(layout: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of this shape in that layout, in elements."""
    slowest_last = list(reversed(range(len(shape))))
    if layout != "contiguous":
        slowest_last = [1, *(axis for axis in slowest_last if axis != 1)]
    strides, step = [0] * len(shape), 1
    for axis in slowest_last:
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def overlaps_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements of a dense tensor would lie at one place, or might."""
    reach = 0
    for step, size in sorted((abs(step), size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False
