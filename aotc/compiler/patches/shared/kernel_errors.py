"""Errors that C++ kernels find in their loops: recorded in a local variable of the kernel, see `noted_errors`."""

from __future__ import annotations

from typing import Any

NOTED = "aotc_error"
"""The local variable in which a kernel's loops record an error."""


def mask_of(kernel: Any) -> str:
    """A C++ expression: the mask of the current elements that count. A scalar bool, or a vector's mask."""
    return "true" if kernel._load_mask is None else str(kernel._load_mask)


def any_of_mask(kernel: Any) -> str:
    """A C++ expression: whether any current element counts. A scalar bool."""
    mask = kernel._load_mask
    return f"!({mask}).all_zero()" if getattr(mask, "is_vec", False) else mask_of(kernel)


def count_of(kernel: Any) -> str:
    """A C++ expression: the number of current elements of a vector."""
    from torch._inductor.codegen import cpp_utils

    expression: Any = cpp_utils.cexpr_index
    return str(expression(kernel.num_elems))
