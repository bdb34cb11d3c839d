"""Weights whose axes lie in another order in memory: after `model.to(memory_format=torch.channels_last)`, say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from aotc.errors import ManifestError
from aotc.reads.tensors import named_state
from aotc.tools.recording.module_factories import Made


def made_as_it_lies(made: Made, module: nn.Module) -> Made:
    """How a module is made with weights that lie as this one's; as before, where theirs are the usual order."""
    if not (strides := _layouts_of(module)):
        return made
    is_last = strides == _channels_last(named_state(module))
    said = {"memory_format": "channels_last"} if is_last else {"strides": strides}
    nested = {"factory": made.factory, "kwargs": made.kwargs}
    return Made(f"{with_layouts.__module__}:{with_layouts.__name__}", {"module": nested, **said})


def _layouts_of(module: nn.Module) -> dict[str, list[int]]:
    """The strides of these weights by their names. Those of other tensors are what the factory makes them: a new tensor
    has the usual ones, and a view with gaps is a view of the module's own."""
    return {
        name: list(tensor.stride())
        for name, tensor in named_state(module).items()
        if type(tensor) in (nn.Parameter, Tensor)
        and tensor.layout is torch.strided
        and tensor.stride() != _usual(tensor.shape)
        and _fills_memory(tensor.shape, tensor.stride())
    }


def _channels_last(state: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The strides of all that `module.to(memory_format=torch.channels_last)` puts into another order."""
    made = {
        name: torch.empty(tensor.shape, device="meta").to(memory_format=torch.channels_last).stride()
        for name, tensor in state.items()
        if tensor.dim() == 4
    }
    return {name: list(strides) for name, strides in made.items() if strides != _usual(state[name].shape)}


def with_layouts(
    module: nn.Module, strides: Mapping[str, Sequence[int]] | None = None, memory_format: str = ""
) -> nn.Module:
    """The module, of which these weights lie so; or all with four axes, where the memory format is `channels_last`.
    Raises ManifestError for strides that are of no order of the axes, and another memory format."""
    state = named_state(module)
    if memory_format not in ("", "channels_last"):
        raise ManifestError(f"{memory_format!r} is not a memory format of weights", hint="it may be channels_last")
    for name, wanted in (_channels_last(state) if memory_format else strides or {}).items():
        if (tensor := state.get(name)) is None or tensor.stride() == tuple(wanted):
            continue  # what the module lacks is told where all of it is compared
        if len(wanted) != tensor.dim() or not _fills_memory(tensor.shape, wanted):
            raise ManifestError(f"{list(wanted)} are not strides of `{name}`, whose shape is {list(tensor.shape)}")
        made = torch.empty_strided(tensor.shape, wanted, dtype=tensor.dtype, device=tensor.device)
        tensor.data = made if tensor.is_meta else made.copy_(tensor.detach())
    return module


def _usual(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _fills_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie side by side, without gaps and overlaps; where an axis has one element, its stride says
    nothing."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
