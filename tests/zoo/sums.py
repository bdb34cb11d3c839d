"""A tensor subclass that keeps its values in other tensors, which no library of quantisation knows of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Sum(Tensor):
    """The sum of two tensors, which may be such sums themselves; `note` is its context."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor, note: str = "") -> Sum:
        return Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, a: Tensor, b: Tensor, note: str = "") -> None:
        self.a, self.b, self.note = a, b, note

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b"], {"note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Sum:
        return cls(inner["a"], inner["b"], context["note"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.add:
            return func(*(each.a + each.b if isinstance(each, Sum) else each for each in args))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, first = torch.ops.aten, args[0]
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return cls(func(first.a), func(first.b), first.note)
        if func is aten.copy_.default and isinstance(args[1], Sum):
            func(first.a, args[1].a)
            func(first.b, args[1].b)
            return first
        return func(*(each.a + each.b if isinstance(each, Sum) else each for each in args), **(kwargs or {}))
