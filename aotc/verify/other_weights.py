"""Other weights for a module: those of the build must be nowhere but in the module, where weights are live."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from aotc.reads.tensors import same_bits
from aotc.tensors.subclasses import unwrapped

LEAST, MOST = 0.5, 1.5
"""The factors. A buffer's are 1 at most: what masks out is often a dtype's smallest number."""
TINY = 0.02
"""What is added at most to a parameter of zeros, which no factor changes."""


@torch.no_grad()
def change_weights(module: nn.Module, seed: int) -> int:
    """Multiply each element of what a checkpoint holds by a random factor; how many tensors were changed.

    Of parameters and buffers, those of floating-point numbers. Signs, zeros and sizes stay what they are, so what a
    model asks of them (variances that are positive, masks) stays true. Of tensors of a class of their own, as quantised
    ones, those within are changed: the scales.
    """
    changed = 0
    state = unwrapped(module.state_dict(keep_vars=True))
    for tensor in {id(tensor): tensor for tensor in state.values()}.values():
        if not _is_changeable(tensor):
            continue
        generator = torch.Generator(tensor.device).manual_seed(seed + changed)
        factors = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        factors.uniform_(LEAST, MOST if isinstance(tensor, nn.Parameter) else 1.0, generator=generator)
        with suppress(RuntimeError):  # an inference tensor, or one whose elements lie in one place
            if tensor.any():
                tensor.mul_(factors)
            elif isinstance(tensor, nn.Parameter):
                tensor.add_(factors * (TINY / MOST))
            changed += 1
    return changed


def _is_changeable(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and is_plain(tensor) and tensor.is_floating_point() and tensor.element_size() > 1


@torch.no_grad()
def copy_state(source: nn.Module, target: nn.Module) -> None:
    """Let the parameters and buffers of `target` have the values of those of `source`, in place, by their names."""
    for own, given in (
        (unwrapped(dict(target.named_parameters())), unwrapped(dict(source.named_parameters()))),
        (unwrapped(dict(target.named_buffers())), unwrapped(dict(source.named_buffers()))),
    ):
        for name, tensor in own.items():
            if (value := given.get(name)) is None or not (is_plain(tensor) and is_plain(value)):
                continue
            same_form = tensor.dtype == value.dtype and tensor.shape == value.shape
            if not (same_form and same_bits(tensor, value)):
                tensor.detach().copy_(value)


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory and bits can be looked at: it is of no class or layout of its own."""
    return type(tensor.detach()) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
