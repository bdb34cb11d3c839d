"""Whether a model rounds values of a call to 8 bits, as dynamic quantisation does its activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Watching:
    rounded = False

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass's own handler calls operators on plain tensors
        result = operator(*args, **(kwargs or {}))
        if not self.rounded and any(map(_is_8_bits, pytree.tree_leaves(result))):
            self.rounded = any(map(_is_float, pytree.tree_leaves((args, kwargs))))
        return result


class RoundingTo8Bits(_Watching, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, `rounded` becomes True at an operator from floats to 8 bits. The handler is inherited, as torch
    imports its compiler for a class that defines one."""


def _is_8_bits(value: Any) -> bool:
    return isinstance(value, Tensor) and value.element_size() == 1 and value.dtype is not torch.bool


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _FLOATS
