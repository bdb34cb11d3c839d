"""LoRA adapters whose scales compiled code reads at each call.

peft keeps the scale of an adapter as a number, or after `enable_lora_hotswap` as a tensor, in a dict of each layer,
`layer.scaling`. Compiled code has a number built in, and knows no tensor that the module does not register. After
`prepare`, the scales are buffers of their layers: peft's and diffusers' own functions set them in place.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import Tensor, nn

from aotc.errors import BindError
from aotc.snapshot.attributes import NOT_READ


def prepare(module: nn.Module, rank: int | None = None) -> nn.Module:
    """Make the scales of a module's adapters, of any rank up to `rank`, tensors that compiled code reads at each call.

    To be called in the factory, after the adapters were added to the module, and in the service, before `aotc.load`.
    Later, `peft.utils.hotswap`, `pipe.load_lora_weights(…, hotswap=True)`, `set_adapters` with other weights for the
    same adapters, and `layer.set_scale` write to the module's tensors in place, and compiled calls see that.

    rank: pad `lora_A` and `lora_B` of all adapters with zeros to this rank, by peft. None: as they are, or as
    `pipe.enable_lora_hotswap(target_rank=…)` has padded them.

    Returns `module`, in which the scales (of the adapter's dtype, without axes) are buffers `scaling_NAME` that no
    checkpoint holds, and the adapters' dropout is gone. What the adapters were configured with (rank, alpha, dropout)
    may then differ from the build's. Raises BindError where the module has no adapters.

        model = aotc.adapters.prepare(peft.get_peft_model(base, config), rank=16)
    """
    layers = [part for part in module.modules() if _has_scales(part)]
    if not layers:
        raise BindError("the module has no LoRA layers", hint="add its adapters first, by peft or diffusers")
    if rank is not None:
        importlib.import_module("peft.utils.hotswap").prepare_model_for_compiled_hotswap(
            module, target_rank=rank, config=getattr(module, "peft_config", None)
        )
    for layer in layers:
        held: Any = layer
        if not isinstance(held.scaling, _Scales):
            held.scaling = _Scales(layer, held.scaling)
        held.lora_dropout = nn.ModuleDict({name: nn.Identity() for name in held.lora_dropout}).train(layer.training)
        setattr(layer, NOT_READ, ("lora_alpha", "r", "use_rslora"))
    for part in module.modules():
        if "peft_config" in vars(part):
            setattr(part, NOT_READ, ("peft_config",))
    return module


def unregistered_scale(module: nn.Module, tensor: Tensor) -> bool:
    """Whether a tensor is the scale of an adapter of a module that was not prepared."""
    layers = (part for part in module.modules() if _has_scales(part))
    return any(value is tensor for layer in layers for value in cast("Any", layer).scaling.values())


def _has_scales(part: nn.Module) -> bool:
    return isinstance(getattr(part, "lora_A", None), nn.ModuleDict) and isinstance(getattr(part, "scaling", None), dict)


class _Scales(dict[str, Any]):
    """A layer's scales by adapter: its buffers, wherever they are moved. What is set is written into them."""

    __slots__ = ("_layer",)

    def __init__(self, layer: nn.Module, scales: dict[str, Any]) -> None:
        self._layer = layer
        super().__init__()
        for name, scale in scales.items():
            self[name] = scale

    def __getitem__(self, name: str) -> Any:
        super().__getitem__(name)  # raises KeyError
        return self._layer._buffers[_buffer(name)]

    def __setitem__(self, name: str, scale: Any) -> None:
        if name in self:
            with torch.no_grad():
                self[name].fill_(scale)
            return
        matrices = cast("Any", self._layer).lora_A
        weight = matrices[name].weight if name in matrices else next(self._layer.parameters())  # an embedding has none
        held = torch.full((), float(scale), dtype=weight.dtype, device=weight.device)
        self._layer.register_buffer(_buffer(name), held, persistent=False)
        super().__setitem__(name, None)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        delattr(self._layer, _buffer(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._layer._buffers.get(_buffer(name), default)

    def values(self) -> Any:
        return self._held().values()

    def items(self) -> Any:
        return self._held().items()

    def __repr__(self) -> str:
        return repr(self._held())

    def _held(self) -> dict[str, Any]:
        return {name: self[name] for name in self}

    def __reduce__(self) -> Any:
        return _named, (self._layer, tuple(self))


def _named(layer: nn.Module, names: tuple[str, ...]) -> _Scales:
    """The scales of a copy of a layer, which holds copies of the buffers."""
    scales = _Scales(layer, {})
    dict.update(scales, dict.fromkeys(names))
    return scales


def _buffer(adapter: str) -> str:
    return f"scaling_{adapter}"
