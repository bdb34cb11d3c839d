"""Results that are views, of tensors of torch: `aotc.call_table.strided_results` says where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from aotc.call_table.strided_results import SizesOf, StridedForm, TensorLibrary, ViewLie, view_maker
from aotc.errors import CorruptError
from aotc.reads.tensors import dtype_of
from aotc.records import Output, StridedView


def make_view(
    output: Output, view: StridedView, sizes_of: SizesOf
) -> Callable[[Tensor, Tensor, Sequence[object], Sequence[object]], Tensor]:
    """As `view_maker`."""
    return view_maker(output, view, sizes_of, _TORCH)


def _viewed(tensor: Tensor, view: StridedView, lie: ViewLie) -> Tensor:
    base = tensor.detach()
    if view.dtype and (dtype := dtype_of(view.dtype)) is not base.dtype:
        count = sum((size - 1) * step for size, step in zip(base.shape, base.stride(), strict=True)) + 1
        ratio = max(dtype.itemsize // base.element_size(), 1)
        base = base.as_strided((count // ratio * ratio if base.numel() else 0,), (1,)).view(dtype)
    try:
        seen = base.as_strided(lie.shape, lie.stride, base.storage_offset() + lie.offset)
    except RuntimeError as error:
        raise CorruptError(
            f"the record's {view} does not fit a tensor of shape {list(tensor.shape)}: {error}"
        ) from error
    if view.conjugate:
        seen = seen.conj()
    return seen._neg_view() if view.negative else seen


def _form(tensor: Tensor) -> StridedForm:
    return StridedForm(tuple(tensor.shape), tensor.stride(), tensor.element_size())


_TORCH = TensorLibrary(_form, lambda dtype: dtype_of(dtype).itemsize, _viewed, Tensor.clone)
