"""Dummy weights: parameters without memory while a factory runs, and random values for them afterwards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aotc.errors import ManifestError
from aotc.manifest import ModelSpec
from aotc.models.dummy_weights import BLOCK, fill, parameters_on_meta
from aotc.models.factory import build_module


class Tied(nn.Module):
    """Two tied parameters, one object twice and a view of it, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        whole = nn.Parameter(torch.randn(6, 4))
        self.one, self.other, self.rows = whole, whole, nn.Parameter(whole.detach()[2:4])
        self.listed = [self.one]
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def made(factory: Any) -> Any:
    with parameters_on_meta():
        module = factory()
    fill(module)
    return module


def memory() -> int:
    """Bytes that this process holds; of memory mapped several times, its share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def test_parameters_keep_their_form_and_what_they_share() -> None:
    module, real = made(Tied), Tied()
    assert module.head.weight is module.embedding.weight
    assert module.one is module.other is module.listed[0]
    assert module.rows.untyped_storage().data_ptr() == module.one.untyped_storage().data_ptr()
    assert torch.equal(module.rows, module.one[2:4])
    forms = [
        [(name, each.shape, each.stride(), each.dtype, each.requires_grad) for name, each in one.named_parameters()]
        for one in (module, real)
    ]
    assert forms[0] == forms[1]


def test_an_lstm_has_its_weights_everywhere() -> None:
    module = made(lambda: nn.LSTM(8, 16, num_layers=2))
    assert [id(each) for each in module._flat_weights] == [id(each) for each in module.parameters()]
    assert module(torch.randn(3, 8))[0].isfinite().all()


def test_buffers_keep_their_values() -> None:
    assert made(Tied).angles.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8])
def test_a_parameter_of_each_dtype_has_finite_values_that_are_the_same_in_every_module(dtype: torch.dtype) -> None:
    def factory() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(300, 70).to(dtype), requires_grad=False)
        return module

    wide = torch.complex64 if dtype.is_complex else torch.float32
    one, other = (made(factory).weight.to(wide) for _ in range(2))
    assert torch.equal(one, other) and one.isfinite().all() and not (one == one[0, 0]).all()


def test_large_parameters_take_the_memory_of_one_block_and_writes_to_one_are_its_own() -> None:
    before = memory()
    module = made(lambda: nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(8))))
    x = module(torch.randn(1, 8192))
    assert sum(each.nbytes for each in module.parameters()) > 2e9 > 40 * BLOCK > 2 * (memory() - before)
    assert 0.5 < x.std() < 2, "a matrix keeps the deviation of its input"
    first, second, *_ = (layer.weight.data for layer in module)
    assert not torch.equal(first, second)
    for number in (2, 3, 4, 8):  # queries, keys and values within one matrix
        parts = first.chunk(number)
        assert not torch.equal(parts[0], parts[1][: len(parts[0])])
    copy = second.clone()
    first.fill_(1)
    assert torch.equal(second, copy) and first.sum() == first.numel()


def test_scales_are_near_one_and_biases_near_zero() -> None:
    norm = made(lambda: nn.LayerNorm(4096))
    assert 0.9 < norm.weight.mean() < 1.1 and 0.001 < norm.weight.std() < 0.1
    assert abs(norm.bias.mean()) < 0.01 and 0.001 < norm.bias.std() < 0.1


@pytest.mark.parametrize(
    ("shape", "inputs"),
    [((8, 64), 64), ((8, 64, 3, 3), 576), ((1, 32, 64), 64), ((4, 256, 512), 512), ((8, 64, 3), 192)],
)
def test_a_parameter_s_deviation_is_that_of_its_inputs(shape: tuple[int, ...], inputs: int) -> None:
    def factory() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(shape))
        return module

    assert 0.6 < made(factory).weight.std() * math.sqrt(inputs) < 1.6


# -- factories of a manifest -------------------------------------------------------------------------------------------

FACTORIES = """
import torch
from torch import nn

def linear():
    return nn.Linear(4, 4)

def reads_a_value():
    module = nn.Linear(4, 4)
    module.scale = module.weight.abs().max().item()
    return module

def computes_a_buffer():
    module = nn.Linear(4, 4)
    module.register_buffer("packed", module.weight.detach() * 2)
    return module

def old_weight_norm():
    return torch.nn.utils.weight_norm(nn.Linear(4, 4))

def computes_an_attribute():
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].packed = module[0].weight.detach() * 2
    return module
"""


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the old weight norm
@pytest.mark.parametrize(
    ("factory", "weights", "said"),
    [
        ("reads_a_value", "live", "raised RuntimeError"),
        ("computes_a_buffer", "live", "computes `packed` from parameters"),
        ("computes_an_attribute", "live", "computes `0.packed` from parameters"),
        ("old_weight_norm", "live", "computes `weight` from parameters"),
        ("linear", "frozen", "`weights: frozen` compiles the values"),
    ],
)
def test_a_model_that_needs_real_values_is_refused(factory: str, weights: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "factories_of_dummies.py").write_text(FACTORIES)
    spec = ModelSpec("model", f"factories_of_dummies.py:{factory}", inputs={}, buckets=({},), weights=weights)
    with pytest.raises(ManifestError, match=said) as refused:
        build_module(spec, tmp_path, dummy_weights=True)
    assert "leave out --dummy-weights" in refused.value.hint
    assert not next(build_module(spec, tmp_path).parameters()).is_meta
