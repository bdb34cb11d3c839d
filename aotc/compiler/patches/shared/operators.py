"""Groups of operators and dtypes that several patches mend, in the notation of `Patch.operators`."""

from __future__ import annotations

INDEXING = (
    "aten.index",
    "aten.gather",
    "aten.scatter",
    "aten.embedding",
    "aten.take",
    "aten.put",
    "aten.repeat_interleave",
    "aten.max_unpool",
    "aten.nll_loss",
    "aten.cross_entropy_loss",
    "aten._unsafe_masked_index",
    "higher_order.flex_attention",
)
"""Operators that read or write elements by an index from a tensor."""

WRITES = (
    "aten.copy_",
    "aten.index_put",
    "aten.index_add",
    "aten.index_copy",
    "aten.index_fill",
    "aten.index_reduce",
    "aten._unsafe_index_put",
    "aten._unsafe_masked_index_put",
    "aten.scatter",
    "aten.masked_scatter",
    "aten.slice_scatter",
    "aten.select_scatter",
    "aten.diagonal_scatter",
    "aten.as_strided_scatter",
    "higher_order.auto_functionalized",
    "higher_order.triton_kernel",
)
"""Operators that write to memory which others read: what in-place operators become on the way through Inductor."""

DIVISIONS = (
    "aten.div.Tensor_mode",
    "aten.div.Scalar_mode",
    "aten.div_.Tensor_mode",
    "aten.div_.Scalar_mode",
    "aten.floor_divide",
    "aten.remainder",
)
"""Quotients that are rounded to an integer, and remainders."""

PRODUCTS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_mm",
    "aten.linear",
    "aten.matmul",
)
"""Matrix products."""

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")

FLOATS = ("float16", "bfloat16", "float32", "float64")
