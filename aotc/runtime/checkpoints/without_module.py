"""The result of a load without a module: compiled code with the weights of a checkpoint, or frozen ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aotc.errors import BindError
from aotc.reads.tensors import dtype_of
from aotc.runtime.compiled import Compiled

if TYPE_CHECKING:
    from aotc.runtime.call import CompiledCall


class CompiledAlone(Compiled):
    """Without a module: there are no parameters to move, and no attributes of the model."""

    __slots__ = ()

    def __init__(self, call: CompiledCall) -> None:
        nn.Module.__init__(self)
        object.__setattr__(self, "_aotc", call)
        self.training = call.artifact.module.training

    def __getattr__(self, name: str) -> Any:
        if name == self.artifact.method:
            return self._aotc
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"{self!r} has no attribute '{name}': it was loaded without a module; aotc.load(ref, module) has all "
                "attributes of the module"
            ) from None

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            raise BindError(
                f"{self!r} was built in {'train' if self.training else 'eval'} mode, and has no module to change",
                hint="build the model in the mode that it is to be called in",
            )
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """As `to`, `half` and their like are applied: what changes nothing is accepted."""
        dtypes = [dtype_of(spec.dtype) for spec in self.artifact.state]
        dtype = next((each for each in dtypes if each.is_floating_point), torch.get_default_dtype())
        weight = torch.empty(0, dtype=dtype, device=self.device)
        moved = fn(weight)
        if (moved.device, moved.dtype) != (weight.device, weight.dtype):
            raise BindError(
                f"{self!r} has {dtype} weights on {weight.device}, and cannot be moved to {moved.dtype} on "
                f"{moved.device}: it was loaded without a module",
                hint=f"load it there: aotc.load(ref, weights=…, device={str(moved.device)!r})",
            )
        return self
