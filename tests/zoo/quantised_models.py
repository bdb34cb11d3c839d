"""Models whose weights are tensor subclasses: torchao's of each kind that runs on a CPU, and one of our own."""

from __future__ import annotations

from typing import Any

import torch
from sums import Sum
from torch import Tensor, nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

WIDTH = 64


class Quantised(nn.Module):
    """A linear layer of each kind, a weight that two layers share, and a sum of sums."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({kind: nn.Linear(WIDTH, WIDTH) for kind in kinds})
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.offset: Any = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + torch.relu(layer(x))
        return torch.Tensor.add(self.plain(x) + self.tied(x), self.offset)


def quantised(seed: int = 0, group: int = 32) -> nn.Module:
    torch.manual_seed(seed)
    configs = {
        "int8": Int8WeightOnlyConfig(),
        "int8_dynamic": Int8DynamicActivationInt8WeightConfig(),
        "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group)),
        "int4_dynamic": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)),
        "float8": Float8WeightOnlyConfig(),
    }
    module = Quantised(list(configs)).bfloat16().eval()
    for kind, config in configs.items():
        quantize_(module.layers[kind], config)
    module.tied.weight = module.layers["int8"].weight  # type: ignore[assignment]
    values = module.offset.detach() / 4
    module.offset = nn.Parameter(Sum(Sum(values, values.clone()), 2 * values), requires_grad=False)
    return module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


def quantised_blocks(seed: int = 0) -> nn.Module:
    """Two equal blocks, and one whose weights are quantised by groups of another size."""
    torch.manual_seed(seed)
    module = nn.Sequential(Block(), Block(), Block()).bfloat16().eval()
    for block, group in zip(module, (32, 32, 64), strict=True):
        quantize_(block, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group)))
    return module


def statically_quantised() -> nn.Module:
    """Of PT2E: a module of torch.export, which refuses `train()` and `eval()`."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    x = torch.randn(2, 8, 12, 12)
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    return convert_pt2e(prepared)  # type: ignore[no-any-return]
