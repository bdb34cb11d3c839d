"""Whether tensors still have the dtypes, shapes and strides that they had: `tensor.data = …` and `tensor.t_()` change
them where the memory stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from aotc.tensors.overlaps import has_memory

GPU_ALIGNMENT = 16
"""Bytes: kernels for a GPU are compiled for arguments that lie so."""

Form = tuple[Any, ...]
_make_guards: Callable[..., Any] | None = getattr(
    getattr(cast(Any, torch._C)._dynamo, "guards", None), "TensorGuards", None
)
"""A comparison of many tensors in one call of C++, which takes a third of the time that asking each takes. It is a part
of `import torch`. It compares more, like whether a gradient is required, and in another mode: so what it denies is
looked at again."""


def forms_check(tensors: Sequence[Tensor]) -> Callable[[list[Any]], bool]:
    """A function that says whether as many tensors have the forms that these have now, in order."""
    forms = list(map(form_of, tensors))
    quick: dict[tuple[bool, bool], Any] = {}

    def have_same_forms(now: list[Any]) -> bool:
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if mode in quick and quick[mode].check(*now):
            return True
        if list(map(form_of, now)) != forms:
            return False
        if _make_guards is not None and now:
            sizes, strides = ([list(form[axes]) for form in forms] for axes in (1, 2))
            quick[mode] = _make_guards(*now, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return True

    return have_same_forms


def form_of(tensor: Tensor) -> Form:
    return tensor.dtype, tensor.shape, tensor.stride()


DENSE_COPY = "give a copy of its values: .to_dense(), or .clone()"


def lacks_values(tensor: Tensor) -> str:
    """Why no compiled code could read a tensor's values from its address: what it is; "" where it could.

    Code that is given such a tensor reads at address 0, which ends the process.
    """
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor.is_meta:
        return "one on the meta device"
    return "one without memory" if tensor.numel() and not has_memory(tensor) else ""


def used_strides(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Strides with those of axes of size 1 set to 0, which do not say where elements lie: `aotc.tensors.layouts`."""
    return [step if size != 1 else 0 for size, step in zip(shape, stride, strict=True)]
