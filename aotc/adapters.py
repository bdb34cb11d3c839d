"""LoRA adapters whose scales compiled code reads at each call, and of which any may be active.

peft keeps the scale of an adapter as a number, or after `enable_lora_hotswap` as a tensor, in a dict of each layer,
`layer.scaling`, and beside it the names of the active adapters. Compiled code has a number and a list built in, and
knows no tensor that the module does not register. After `prepare`, the scales are buffers of their layers, and forward
adds all adapters, of which those that are not active have the scale 0. peft's and diffusers' own functions set them in
place.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from aotc.errors import BindError
from aotc.reads.attributes import NOT_READ


def prepare(module: nn.Module, rank: int | None = None) -> nn.Module:
    """Make the scales of a module's adapters, of any rank up to `rank`, tensors that compiled code reads at each call.

    To be called in the factory, after the adapters were added to the module, and in the service, before `aotc.load`.
    Later, `peft.utils.hotswap`, `pipe.load_lora_weights(…, hotswap=True)`, `set_adapters`, `set_adapter`,
    `disable_adapters`, `disable_adapter()` and `layer.set_scale` write to the module's tensors in place, and compiled
    calls see that. All adapters are computed in each call, active or not.

    rank: pad `lora_A` and `lora_B` of all adapters with zeros to this rank, by peft. None: as they are, or as
    `pipe.enable_lora_hotswap(target_rank=…)` has padded them.

    Returns `module`, in which the scales (of the adapter's dtype, without axes) are buffers `scaling_NAME` that no
    checkpoint holds, 0 while the adapter is not active, and the adapters' dropout is gone. What the adapters were
    configured with (rank, alpha, dropout), and which are active, may then differ from the build's. Only which are
    active may not where an adapter is of a variant of LoRA, like DoRA: a scale of 0 does not switch it off. Raises
    BindError where the module has no adapters.

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
        _prepare_layer(layer)
    for part in module.modules():
        if own := tuple(name for name in _OF_MODELS if name in vars(part)):
            setattr(part, NOT_READ, own)
    return module


_OF_MODELS = ("peft_config", "active_adapter", "_adapters_disabled")
"""What peft keeps beside the layers' own state about all of them."""


def _prepare_layer(layer: Any) -> None:
    if not isinstance(layer.scaling, _Scales):
        layer.scaling = _Scales(layer, layer.scaling)
    layer.lora_dropout = nn.ModuleDict({name: nn.Identity() for name in layer.lora_dropout}).train(layer.training)
    setattr(layer, NOT_READ, ("lora_alpha", "r", "scaling", "use_rslora"))
    if getattr(layer, "lora_variant", None):  # DoRA, for one, is not off where its scale is 0
        return
    if not isinstance(layer, _Switched):
        selected, is_off = layer.active_adapters, layer.disable_adapters
        for name in ("_active_adapter", "_disable_adapters"):
            vars(layer).pop(name, None)
        layer.__class__ = _switched(cast("Any", type(layer)))
        layer._selected, layer._is_off = list(selected), is_off
    layer.prepared_adapters = tuple(layer.scaling)
    layer._select()


def is_prepared(layer: nn.Module) -> bool:
    """Whether the scales of a layer of peft are tensors that compiled code reads."""
    return isinstance(getattr(layer, "scaling", None), _Scales)


def unregistered_scale(module: nn.Module, tensor: Tensor) -> bool:
    """Whether a tensor is the scale of an adapter of a module that was not prepared."""
    layers = (part for part in module.modules() if _has_scales(part))
    return any(value is tensor for layer in layers for value in cast("Any", layer).scaling.values())


def _has_scales(part: nn.Module) -> bool:
    return isinstance(getattr(part, "lora_A", None), nn.ModuleDict) and isinstance(getattr(part, "scaling", None), dict)


_running = threading.local()
"""`layer`: the layer whose forward this thread is in."""


class _Switched(nn.Module):
    """A layer of peft whose forward adds all prepared adapters. Everything else sees those that are active.

    The names are read in forward, and so compared with the build's; `other_adapters` were added since and are active.
    """

    prepared_adapters: tuple[str, ...]
    other_adapters: tuple[str, ...]
    scaling: _Scales
    _selected: list[str]
    _is_off: bool

    @property
    def _active_adapter(self) -> list[str]:
        if getattr(_running, "layer", None) is self:
            return [*self.prepared_adapters, *self.other_adapters]
        return self._selected

    @_active_adapter.setter
    def _active_adapter(self, names: str | Iterable[str]) -> None:
        self._selected = [names] if isinstance(names, str) else list(names)
        self._select()

    @property
    def _disable_adapters(self) -> bool:
        return getattr(_running, "layer", None) is not self and self._is_off

    @_disable_adapters.setter
    def _disable_adapters(self, is_off: bool) -> None:
        self._is_off = is_off
        self._select()

    def _select(self) -> None:
        self.other_adapters = tuple(name for name in self._selected if name not in self.prepared_adapters)
        self.scaling.select(() if self._is_off else self._selected)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_layer, (type(self).__mro__[2],), vars(self)


@functools.cache
def _switched(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass with the name of its base."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("adapter_names") is not None:  # each row of the batch names its own, active or not
            return cls.forward(self, *args, **kwargs)
        around, _running.layer = getattr(_running, "layer", None), self
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            _running.layer = around

    own = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_Switched, cls), own)


def _new_layer(cls: type[nn.Module]) -> nn.Module:
    made = _switched(cast("Any", cls))
    return made.__new__(made)


class _Scales(dict[str, Any]):
    """A layer's scales by adapter: its buffers, wherever they are moved. What is set is written into them.

    The buffer of an adapter that is not active holds 0, which only the layer's forward reads. Its scale is kept here.
    """

    __slots__ = ("_kept", "_layer")

    def __init__(self, layer: nn.Module, scales: dict[str, Any]) -> None:
        self._layer = layer
        self._kept: dict[str, Tensor] = {}
        super().__init__()
        for name, scale in scales.items():
            self[name] = scale

    def select(self, names: Iterable[str]) -> None:
        """Let these adapters have their scales, and all others 0."""
        active = set(names)
        with torch.no_grad():
            for name in self:
                held = self._buffer(name)
                if name in active and name in self._kept:
                    held.copy_(self._kept.pop(name))
                elif name not in active and name not in self._kept:
                    self._kept[name] = held.clone()
                    held.zero_()

    def __getitem__(self, name: str) -> Any:
        super().__getitem__(name)  # raises KeyError
        held = self._buffer(name)
        return held if getattr(_running, "layer", None) is self._layer else self._kept.get(name, held)

    def __setitem__(self, name: str, scale: Any) -> None:
        if name in self:
            with torch.no_grad():
                self[name].fill_(scale)
            return
        matrices = cast("Any", self._layer).lora_A
        weight = matrices[name].weight if name in matrices else next(self._layer.parameters())  # an embedding has none
        held = torch.full((), float(scale), dtype=weight.dtype, device=weight.device)
        self._layer.register_buffer(_buffer_name(name), held, persistent=False)
        super().__setitem__(name, None)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._kept.pop(name, None)
        delattr(self._layer, _buffer_name(name))

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def values(self) -> Any:
        return self._held().values()

    def items(self) -> Any:
        return self._held().items()

    def __repr__(self) -> str:
        return repr(self._held())

    def _held(self) -> dict[str, Any]:
        return {name: self[name] for name in self}

    def _buffer(self, name: str) -> Any:
        return self._layer._buffers[_buffer_name(name)]

    def __reduce__(self) -> Any:
        return _named, (self._layer, tuple(self), dict(self._kept))


def _named(layer: nn.Module, names: tuple[str, ...], kept: dict[str, Tensor]) -> _Scales:
    """The scales of a copy of a layer, which holds copies of the buffers."""
    scales = _Scales(layer, {})
    dict.update(scales, dict.fromkeys(names))
    scales._kept = kept
    return scales


def _buffer_name(adapter: str) -> str:
    return f"scaling_{adapter}"
