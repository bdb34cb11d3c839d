"""The model in float64: what eager and compiled code are both judged against.

A module and inputs in float64 are not enough where the model itself says float32, as embeddings of timesteps and
positions do: then it computes in float32 in both runs, eager seems to make no error at all, and nothing is left to
judge compiled code by but the floor. So while a reference is computed every operator computes in float64, whatever
dtype it is asked for. What the model casts is rounded as it asks (`x.half().float()` is not `x`), and held in float64
from there on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}
_CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype, torch.ops.aten.to.dtype_layout})
_OF_BITS = frozenset({torch.ops.aten.view.dtype})


@contextmanager
def in_float64() -> Iterator[None]:
    """While active, all operators of this thread compute in float64, which is also the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def in_double(value: Any) -> Any:
    """A tensor of real or complex numbers in double precision; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return value.double() if value.is_floating_point() else value.to(torch.complex128) if value.is_complex() else value


def forget_failed_traces() -> None:
    """Reset torch's record of failed traces: eager traces `torch.cond` and loops, too, and would not retry a trace that
    failed."""
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.reset()


class _Widening:
    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if operator in _OF_BITS:
            return operator(*args, **kwargs)
        asked = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        # A tensor that is written to, or of which a view is made, must stay itself.
        stays = operator._schema.is_mutable or operator.is_view
        args, kwargs = pytree.tree_map(_widened_dtype if stays else _widened, (tuple(args), kwargs))
        try:
            result = operator(*args, **kwargs)
        except (RuntimeError, TypeError):  # there are operators that take no float64: products of groups of matrices
            if stays:
                raise
            args, kwargs = pytree.tree_map(_narrowed, (args, kwargs))
            result = pytree.tree_map(_widened, operator(*args, **kwargs))
        if operator in _CASTS and asked and asked[0] in _WIDE:
            return result.to(asked[0]).to(_WIDE[asked[0]])
        return result


class _InFloat64(_Widening, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """torch wraps a handler that such a class defines itself, and imports its compiler to do so: it is inherited."""


def _widened_dtype(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _narrowed(value: Any) -> Any:
    is_wide = value is torch.float64 or (type(value) in (Tensor, nn.Parameter) and value.dtype == torch.float64)
    if not is_wide:
        return value
    return value.float() if isinstance(value, Tensor) else torch.float32


def _widened(value: Any) -> Any:
    if type(value) in (Tensor, nn.Parameter) and value.dtype in _WIDE:
        return value.to(_WIDE[value.dtype])
    return _widened_dtype(value)
