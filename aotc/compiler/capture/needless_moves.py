"""`part.to(dtype)` within forward, where the part has that dtype already.

torch.export cannot follow a module's `to`, which sets parameters. Mixtures of experts call it in each forward to keep a
router in float32, and mostly nothing is to change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@contextmanager
def needless_moves_skipped() -> Iterator[None]:
    """While active, `nn.Module.to` returns the module where each tensor is as it asks."""
    move: Any = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        asked: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, _, layout = asked
        if layout is None and all(_is_so(tensor, device, dtype) for tensor in _tensors(module)):
            return module
        moved: nn.Module = move(module, *args, **kwargs)
        return moved

    with mock.patch.object(nn.Module, "to", to):
        yield


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _is_so(tensor: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    """As `nn.Module.to` asks: a dtype is for tensors of floating-point and of complex numbers."""
    casts = dtype is not None and (tensor.is_floating_point() or tensor.is_complex())
    return (device is None or tensor.device == device) and not (casts and tensor.dtype != dtype)
