"""What `dtype:` of a model casts: real floating-point tensors, except buffers that are float64 on purpose; never
complex ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the module in place to `dtype`, as `module.to(dtype)` does, except the tensors of `stays`."""
    kept = stays(module)

    def to(tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in kept or not is_real(tensor) else tensor.to(dtype)

    module._apply(to)  # type: ignore[no-untyped-call]
    return module


def stays(module: nn.Module) -> set[int]:
    """The ids of the tensors that are not cast: complex ones, which would lose their imaginary part, and float64
    buffers beside parameters of another dtype, which need the precision."""
    others = any(is_real(parameter) and parameter.dtype != torch.float64 for parameter in module.parameters())
    precise = {id(buffer) for buffer in module.buffers() if others and buffer.dtype == torch.float64}
    return precise | {id(each) for each in (*module.parameters(), *module.buffers()) if each.is_complex()}


def changed_by_cast(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """The names of the buffers that `cast` would change; a factory must create them in that dtype."""
    kept = stays(module)
    named = module.named_buffers()
    return [name for name, each in named if id(each) not in kept and is_real(each) and each.dtype != dtype]


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor holds real floating-point numbers."""
    return tensor.is_floating_point()
