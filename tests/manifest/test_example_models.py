"""The models of `examples/` and the manifests of `manifests/` go together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from aotc.manifest import read_manifest
from aotc.manifest.inputs import parse_inputs
from aotc.models.calls import fill
from aotc.models.example_inputs import example_leaves, leaf_shape
from aotc.models.factory import build_modules
from aotc.records import tuned_dims
from examples import models

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_the_families_that_are_measured_are_a_valid_manifest() -> None:
    assert len(read_manifest("tests/zoo/families.yaml").models) > 30


@pytest.mark.parametrize("name", ["quickstart", "gpt"])
def test_every_model_of_a_manifest_runs_on_its_inputs(name: str) -> None:
    manifest = read_manifest(f"manifests/{name}.yaml")
    for model, module in build_modules(manifest).items():
        spec = manifest.models[model]
        for bucket in spec.buckets:
            leaves = example_leaves(spec, tuned_dims(bucket), "cpu", seed=0)
            with torch.inference_mode():
                output = module(**fill(parse_inputs(spec.inputs)[0], leaves))
            assert output.isfinite().all()
            assert output.dtype is getattr(torch, spec.dtype or "float32")


def test_the_yardsticks_have_the_sizes_of_the_articles() -> None:
    specs = read_manifest("manifests/blog.yaml").models
    shapes = {
        name: [leaf_shape(leaf, tuned_dims(bucket)) for leaf in parse_inputs(spec.inputs)[1] for bucket in spec.buckets]
        for name, spec in specs.items()
    }
    assert shapes == {"pointwise": [(1024, 4096)], "matmul": [(1024, 4096)], "tinyblock": [(32, 128, 768)]}


def test_pointwise_heavy_computes_what_the_articles_state() -> None:
    model = models.pointwise_heavy(dim=8)
    torch.nn.init.normal_(model.scale)
    torch.nn.init.normal_(model.bias)
    x = torch.randn(4, 8)
    y = x * model.scale + model.bias
    for index in range(3):
        y = torch.sin(y) + torch.cos(y) * torch.tanh(y)
        y = y * torch.sigmoid(y) + torch.relu(y)
        if index < 2:
            y = y / (1 + torch.abs(y))
    torch.testing.assert_close(model(x), y)


def test_tiny_block_computes_what_the_articles_state() -> None:
    model = models.tiny_block(hidden=8, expansion=4)
    x = torch.randn(2, 3, 8)
    y = torch.nn.functional.gelu(model.up(model.norm(x))) * 2**0.5 + 0.01
    torch.testing.assert_close(model(x), model.down(y) + x)


def test_matmul_heavy_is_linears_with_relu() -> None:
    model = models.matmul_heavy(dim=8, layers=4)
    assert [tuple(layer.weight.shape) for layer in model.layers] == [(8, 8)] * 4
    assert (model(torch.randn(3, 8)) >= 0).all()


def test_gpt_sees_no_later_token() -> None:
    model = models.gpt(layers=2, width=16, heads=2, vocabulary=50, positions=16).eval()
    ids = torch.randint(0, 50, (1, 8))
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 50
    one, other = model(ids), model(changed)
    torch.testing.assert_close(one[:, :5], other[:, :5])
    assert not torch.allclose(one[:, 5:], other[:, 5:])


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="width 10 cannot be divided among 3 heads"):
        models.transformer_block(width=10, heads=3)
