"""What the standalone runtime has of torch: the build and `aotc.standalone.misfits` read it here.

A library of AOTInductor takes from torch's libraries functions of the C shim (`aoti_torch_*`, where `_v2` at the end of
a name is the version of a signature), of Sleef, and some of C++. A test compares the names with what the runtime
exports.
"""

from __future__ import annotations

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
        elif name not in FUNCTIONS and not name.startswith(SLEEF) and not (name in BY_NAME and by_name):
            yield name, ""
    for name in by_name:
        yield name, ""
