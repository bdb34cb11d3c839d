"""A model with LoRA adapters of peft, for test_adapters.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peft
import torch
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from torch import Tensor, nn

from aotc import adapters

RANK = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.query(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def config(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(target_modules=["query"], init_lora_weights=False, **options)


def plain(names: Sequence[str] = ("one", "two"), seed: int = 0, **options: Any) -> nn.Module:
    """With adapters as peft makes them, all active. The base's weights are always the same."""
    return wrapped(names, seed, **options).base_model.model


def wrapped(names: Sequence[str] = ("one", "two"), seed: int = 0, **options: Any) -> peft.PeftModel:
    """The same, within peft's own model."""
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(seed)
    whole = peft.get_peft_model(net, config(**options), names[0])
    for name in names[1:]:
        whole.add_adapter(name, config(**options))
    whole.base_model.set_adapter(list(names))
    return whole.eval()


def prepared(**options: Any) -> nn.Module:
    return adapters.prepare(plain(**{"r": 4, "lora_alpha": 8, **options}), rank=RANK).eval()


def whole() -> nn.Module:
    """Of which one adapter is active."""
    model = wrapped(r=4, lora_alpha=8)
    model.set_adapter("one")
    return adapters.prepare(model, rank=RANK).eval()


def unprepared() -> nn.Module:
    module = plain(r=4)
    prepare_model_for_compiled_hotswap(module, target_rank=RANK)
    return module
