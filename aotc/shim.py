"""What the standalone runtime has of torch: the build and `aotc.standalone.misfits` read it here.

A library of AOTInductor takes from torch's libraries functions of the C shim (`aoti_torch_*`, where `_v2` at the end of
a name is the version of a signature), of Sleef, and some of C++. A test compares the names with what the runtime
exports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from aotc.records import LibraryImports

_OF_TENSORS = (
    *("_alloc_from_pool", "_reinterpret_tensor", "as_strided", "assign_tensors_out", "clone", "clone_preserve_strides"),
    *("copy_", "create_tensor_from_blob", "create_tensor_from_blob_v2", "delete_tensor_object", "empty_strided"),
    *("get_data_ptr", "get_device_index", "get_device_type", "get_dim", "get_dtype", "get_layout", "get_numel"),
    *("get_size", "get_sizes", "get_storage_offset", "get_storage_size", "get_stride", "get_strides", "is_defined"),
    *("get_storage_numel", "item_bool", "item_float32", "item_float64", "new_tensor_handle", "tensor_copy_", "zero_"),
    *(f"item_{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
_OF_THE_PROCESS = ("check", "grad_mode_is_enabled", "grad_mode_set_enabled", "warn")
_NUMBERS = (
    *(f"device_type_{name}" for name in ("cpu", "cuda", "meta", "mps", "privateuse1", "xpu")),
    *(f"dtype_{name}" for name in ("bfloat16", "bool", "element_size", "float16", "float32", "float64")),
    *(f"dtype_float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")),
    *(f"dtype_{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"dtype_complex{bits}" for bits in (32, 64, 128)),
    *("layout__mkldnn", "layout_strided"),
    *(
        f"memory_format_{name}"
        for name in ("channels_last", "channels_last_3d", "contiguous_format", "preserve_format")
    ),
)

FUNCTIONS = frozenset(f"aoti_torch_{name}" for name in (*_OF_TENSORS, *_OF_THE_PROCESS, *_NUMBERS)) | {
    "aoti_record_function_end"
}
"""Functions of the C shim that compute nothing."""

_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})

OPERATORS: dict[str, frozenset[str]] = {
    "aoti_torch_cpu_mm_out": _FLOATS,
    "aoti_torch_cpu_addmm_out": _FLOATS,
    "aoti_torch_cpu_bmm_out": _FLOATS,
    "aoti_torch_cpu_baddbmm_out": _FLOATS,
    "aoti_torch_cpu_convolution": frozenset({"float32"}),
    "aoti_torch_cpu__linear_pointwise": _FLOATS,
    "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu": (_FLOATS | {"bool"}) - {"float64"},
}
"""Operators, by their function of the C shim, each with the dtypes that its tensors may have."""

GPU_FUNCTIONS = frozenset(
    {
        *(f"aoti_torch_{name}_cuda_guard" for name in ("create", "delete")),
        *(f"aoti_torch_{name}_cuda_stream_guard" for name in ("create", "delete")),
        *("aoti_torch_cuda_guard_set_index", "aoti_torch_get_current_cuda_stream", "aoti_torch_empty_strided_pinned"),
        *(f"aoti_torch_cuda_caching_allocator_raw_{name}" for name in ("alloc", "delete")),
        *(f"cuda{name}" for name in ("Free", "GetDevice", "GetErrorString", "GetLastError", "Malloc", "Memcpy")),
        *(f"cuda{name}" for name in ("MemcpyAsync", "PointerGetAttributes", "SetDevice")),
        *(f"cudaEvent{name}" for name in ("Create", "CreateWithFlags", "Destroy", "Query", "Record", "Synchronize")),
        *(f"cudaStream{name}" for name in ("CreateWithFlags", "Destroy", "Synchronize", "WaitEvent")),
    }
)
"""Functions that code for a GPU calls besides: of the C shim, and of CUDA's runtime (libcudart), which the standalone
runtime has over the driver."""

_OF_THE_DRIVER = re.compile(r"cu[A-Z]\w+")
"""Functions of the driver (libcuda), which code for a GPU calls itself."""

_OF_CPP = re.compile(r"_Z(?:T[VTIS])?(?:N[KOR]*)?St\w*")
"""Functions of namespace std. In a library that was linked with torch's CUDA build, some have no version: that torch
has them, too, and comes first. Without torch they are libstdc++'s."""

SLEEF = "Sleef_"
"""The beginning of the names of vector mathematics, of which the runtime has all."""

BY_NAME = ("aoti_torch_proxy_executor_call_function", "aoti_torch_new_uninitialized_tensor")
"""The functions by which a library calls operators by name, through torch's dispatcher."""


def lacking(imports: LibraryImports) -> Iterator[tuple[str, str]]:
    """What the runtime lacks of these: each function or operator, with the dtypes that it lacks, joined by commas (""
    for all)."""
    by_name = [name for name in imports.operators if name not in imports.functions]
    for name in imports.functions:
        if name in OPERATORS:
            if name not in imports.operators:
                yield name, "unknown dtypes"
            elif others := sorted({*imports.operators[name]} - OPERATORS[name]):
                yield name, ", ".join(others)
        elif not _is_there(name) and not (name in BY_NAME and by_name):
            yield name, ""
    for name in by_name:
        yield name, ""


def _is_there(name: str) -> bool:
    if name in FUNCTIONS or name in GPU_FUNCTIONS or name.startswith(SLEEF):
        return True
    return any(pattern.fullmatch(name) for pattern in (_OF_THE_DRIVER, _OF_CPP))
